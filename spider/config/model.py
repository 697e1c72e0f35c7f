"""Families of models: how a run's ``model:`` block finds the schema that checks it.

A family is a package of two modules (docs/architecture.md, "Adding a family"). Those in ``spider/model/`` are
known by their folder's name and their presets; any other by the name it is imported by, ``model: {family:
my_package.my_family}``. Nothing else in Spider names a family.

Reading a model imports its family, and importing runs code: `spider.config.imports` says which names may be
imported.
"""

from __future__ import annotations

from functools import reduce
from operator import attrgetter, getitem
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, SerializeAsAny

from spider.config.block import Block, ConfigError, Positive, none_such, wrong_key
from spider.config.imports import import_named, may_import
from spider.config.ngram import NgramConfig


class ModelConfig(Block):
    """What the block of every family has."""

    #: Path, below ``model``, of how often a looped part runs; None: the family has no loops.
    LOOPS: ClassVar[str | None] = None
    #: Whether it reads whatever vocabulary its dataset has; else bytes alone.
    ANY_TOKENS: ClassVar[bool] = False
    #: Whether its ``forward`` takes ``segments_BT``, which document of its row each id is of (0: padding), to
    #: read each document alone.
    DOCUMENTS: ClassVar[bool] = False
    #: Path of whether activations are recomputed, which no weight knows of; None: the family does not.
    RECOMPUTE: ClassVar[str | None] = None
    #: What stands there where all that can be is recomputed.
    MOST_RECOMPUTED: ClassVar[Any] = True

    family: str = "spider"
    """Which architecture; a preset implies it."""
    preset: str = ""
    """Named sizes to start from; keys beside it change a part."""
    vocab_size: Positive | None = None
    """Ids that it reads and writes (null: those of bytes). The dataset's tokenizer decides; leave it out."""
    ngram: NgramConfig | None = None
    """Read what counts of a text, and the document itself, propose (docs/ngram.md; null: do not)."""

    @property
    def looped(self) -> bool:
        """Whether a part of this model runs as often as asked."""
        return self.LOOPS is not None

    @property
    def loops(self) -> int:
        """Times the looped part runs, where a stage does not say."""
        return attrgetter(self.LOOPS)(self) if self.LOOPS else 1

    @property
    def recomputes(self) -> Any:
        """What stands at `RECOMPUTE`."""
        return attrgetter(self.RECOMPUTE)(self) if self.RECOMPUTE else False

    def recomputing(self) -> dict[str, Any]:
        """What to lay on this block for the least memory that recomputation leads to; empty where nothing
        more can be recomputed."""
        if not self.RECOMPUTE or self.recomputes == self.MOST_RECOMPUTED:
            return {}
        block = self.MOST_RECOMPUTED
        for key in reversed(self.RECOMPUTE.split(".")):
            block = {key: block}
        return block

    @property
    def most_recomputed(self) -> str:
        """`MOST_RECOMPUTED` as it is written in a file."""
        return str(self.MOST_RECOMPUTED).lower()

    @property
    def samples_loops(self) -> bool:
        """Whether each training step draws its own number of loops, from 1 to 2 `loops` - 1."""
        return False

    def problems(self, precision: str, compiled: bool | None) -> list[str]:
        """What of a run does not go with this model, each with the run's key: ``compile: ...``."""
        return []

    def shape_of_weights(self) -> dict[str, Any]:
        """What two models must share to read each other's weights, as plain JSON."""
        plain = self.model_dump(mode="json")
        if self.RECOMPUTE:
            *blocks, key = self.RECOMPUTE.split(".")
            del reduce(getitem, blocks, plain)[key]
        return plain


def default_family() -> str:
    """Of a block that names neither a family nor a preset."""
    return ModelConfig.model_fields["family"].default


def families() -> list[str]:
    """Those that come with Spider."""
    return sorted(path.parent.name for path in Path(__file__).parents[1].glob("model/*/config.py"))


def family_module(family: str, module: str) -> ModuleType:
    """Import ``config`` or ``model`` of a family.

    Raises:
        ConfigError: the family does not exist, cannot be imported, or was not named by the user.
    """
    if family not in families() and not may_import(family):
        raise ConfigError(
            f"the family {family!r} is neither one of Spider's ({', '.join(families())}) nor registered by "
            "an installed package, and importing it runs its code. If you trust that code, name the family: "
            f"spider --family-module {family}, spider.load_model(path, family_module={family!r}), or "
            "trust_remote_code=True in transformers"
        )
    package = f"spider.model.{family}" if family in families() else family
    return import_named("family", family, package, families(), module)


def family_config(family: str) -> type[ModelConfig]:
    """The schema of a family's block; raises as `family_module`."""
    config = getattr(family_module(family, "config"), "Config", None)
    if not (isinstance(config, type) and issubclass(config, ModelConfig)):
        raise ConfigError(f"family {family!r}: its config.py defines no Config, a spider.config.ModelConfig")
    return config


def presets(family: str) -> dict[str, dict[str, Any]]:
    return getattr(family_module(family, "config"), "PRESETS", {})


def model_block(given: Any) -> Any:
    """``tiny`` or ``{preset: tiny, ...}`` as the preset's full mapping, with the family's name in it;
    `ValidationError` where there is no such family or preset."""
    block = {"preset": given} if isinstance(given, str) else given
    if not isinstance(block, dict):
        return given
    known = {name: family for family in families() for name in presets(family)}
    if (family := block.get("family")) is not None:
        try:
            known = dict.fromkeys(presets(str(family)), str(family))
        except ConfigError as error:
            raise wrong_key("family", str(error)) from None
    preset = block.get("preset") or next(iter(presets(str(family or default_family()))), "")
    if preset and preset not in known:
        raise wrong_key("preset", none_such("preset", preset, known))
    family = family or known[preset]
    return merged(presets(family).get(preset, {}), {**block, "preset": preset, "family": family})


def merged(base: Any, over: Any) -> Any:
    """``over`` laid on ``base``: mappings are merged key by key, anything else is replaced."""
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    return {**base, **{k: merged(base.get(k), v) for k, v in over.items()}}


def family_block(value: Any) -> Any:
    """A mapping as the block of the family that it names, or, written before families were named, of the
    default's; anything else as it is. `ConfigError` of a family that is not here, `ValidationError` of keys
    or values that it does not know."""
    if not isinstance(value, dict):
        return value
    return family_config(value.get("family", default_family())).model_validate(value)


#: A model's block of whatever family it names.
AnyModel = Annotated[SerializeAsAny[ModelConfig], BeforeValidator(family_block)]
