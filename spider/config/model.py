"""Families of models, and the schema of a run's ``model:`` block.

A family is a package of two modules (docs/extending.md). A family in ``spider/model/``
has its folder's name. Any other has its import path, ``model: {family: my_package.my_family}``. No other
module of Spider names a family.

`NgramConfig` has the settings of the n-gram index and of the head that reads it, for any family.

Reading a model imports its family, and importing runs code. `spider.config.imports` decides which names may
be imported.
"""

from __future__ import annotations

import re
from functools import cache, reduce
from operator import attrgetter, getitem
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SerializeAsAny, field_validator

from spider.config.block import Block, ConfigError, Positive, identity, none_such, wrong_key
from spider.config.imports import import_named, may_import

#: Largest order, in bytes.
LONGEST_ORDER = 64
#: Largest number of kinds of contexts in a list.
MOST_KINDS = 24
#: Largest number of words before the current one.
MOST_WORDS = 8
#: Number of the first context of the layout of a text; smaller than all others.
FIRST_STRUCTURE = ~MOST_WORDS - 1
#: Contexts of the layout of a text, by name.
STRUCTURES = ("column", "indent", "above")


@cache
def kind_of(name: int | str) -> int:
    """Return the number of a kind of context (`spider.data.ngram.contexts`), given its name.

    Raises:
        ValueError: The name is not one of a kind.
    """
    name = str(name)
    if name in STRUCTURES:
        return FIRST_STRUCTURE - STRUCTURES.index(name)
    if name.isdecimal() and 1 <= int(name) <= LONGEST_ORDER:
        return int(name)
    if (words := re.fullmatch(r"words(\d)", name)) and int(words[1]) <= MOST_WORDS:
        return ~int(words[1])
    raise ValueError(
        f"{name} is not a kind of context; there are orders (1 to {LONGEST_ORDER}), words0 to "
        f"words{MOST_WORDS}, {', '.join(STRUCTURES)}"
    )


def name_of(kind: int) -> str:
    """Return the name of a kind of context, as in the configuration: ``12``, ``words2``, ``above``."""
    if kind > 0:
        return str(kind)
    if kind >= ~MOST_WORDS:
        return f"words{~kind}"
    return STRUCTURES[FIRST_STRUCTURE - kind]


def _checked(name: int | str) -> int | str:
    kind_of(name)
    return name


Kinds = Annotated[list[Annotated[int | str, AfterValidator(_checked)]], Field(min_length=1)]


class NgramConfig(Block):
    """N-gram index of the dataset's n-gram split, match model of the document, and the head that scores the
    candidates of both (docs/ngram.md)."""

    #: Share of the training windows that look back, if ``carry_over`` is not 0.
    CARRY_SHARE: ClassVar[float] = 0.25

    contexts: Kinds = [1, 2, 3, 4, 5, 6, 7, 9, 12, 16, 22]
    """Contexts whose successors are counted in the index: orders, and kinds that docs/ngram.md lists. The
    candidates of later ones come first."""
    rare: Positive = 9
    """Lowest order whose contexts are left out if they occur once. The match model covers them."""
    matches: Kinds = [2, 3, 4, 5, 6, 8, 11, 15, 20, 32]
    """Contexts that are found earlier in the document, of the same kinds. The candidates of later ones come
    first."""
    counts: list[Annotated[int, Field(ge=1, le=LONGEST_ORDER)]] = []
    """Orders whose successors are counted within the document."""
    carry_over: Annotated[int, Field(ge=0)] = 0
    """Bytes of earlier training documents that matches look back on in training (0: the document alone)."""
    hidden: Positive = 48
    """Width of the head's features of a candidate."""
    state: Positive = 96
    """Width of the head's features of a position."""

    @field_validator("contexts", "matches", "counts")
    @classmethod
    def _distinct(cls, names: list[int | str]) -> list[int | str]:
        if len(set(map(str, names))) < len(names):
            raise ValueError(f"must not repeat a kind (got {names})")
        if len(names) > MOST_KINDS:
            raise ValueError(f"must have at most {MOST_KINDS} kinds (got {len(names)})")
        return names

    @property
    def context_kinds(self) -> list[int]:
        """Kinds of the counted contexts."""
        return list(map(kind_of, self.contexts))

    @property
    def match_kinds(self) -> list[int]:
        """Kinds of the contexts that are found in the document."""
        return list(map(kind_of, self.matches))

    def counting(self) -> dict[str, Any]:
        """Return the changed settings that decide the tables."""
        return self.changed(include={"contexts", "rare"})

    @property
    def counted(self) -> str:
        """Digest of the settings that decide the tables."""
        return identity(self.counting())


#: Activations of a layer that the backward pass recomputes (`spider.model.layers`).
Recompute = Literal["none", "selective", "full"]


class ModelConfig(Block):
    """Base class of the block of every family."""

    #: Path, below ``model``, of the number of loops; None for a family without loops.
    LOOPS: ClassVar[str | None] = None
    #: Whether the family reads the tokens of any vocabulary. Otherwise it reads bytes only.
    ANY_TOKENS: ClassVar[bool] = False
    #: Whether ``forward`` takes ``document_BT``, the number of each token's document in its row (0: padding),
    #: and then reads each document by itself.
    DOCUMENTS: ClassVar[bool] = False
    #: Whether the model implements ``ffn_inputs``, for ``evaluation.ttt.objective: projection``.
    FFN_INPUTS: ClassVar[bool] = False
    #: Path, below ``model``, of the setting for recomputed activations; None if the family recomputes none.
    #: No weight depends on this setting.
    RECOMPUTE: ClassVar[str | None] = None
    #: Roles of the groups of parameters that ``optimizer.groups`` may name (`Model.parameter_groups`).
    GROUPS: ClassVar[dict[str, str]] = {"matrices": "matrix", "tables": "table", "vectors": "vector"}
    #: Key of the width that ``width_exponent`` of the optimizer scales rates by; None for a family without.
    WIDTH: ClassVar[str | None] = None
    #: Value of that setting that recomputes the most activations.
    MOST_RECOMPUTED: ClassVar[Any] = True

    family: str = "spider"
    """Architecture of the model; a preset implies it."""
    preset: str = ""
    """Name of a preset. Other keys of the block override parts of it."""
    vocab_size: Positive | None = None
    """Size of the vocabulary (null: bytes). The dataset's tokenizer decides it; leave it out."""
    ngram: NgramConfig | None = None
    """N-gram index, match model and the head that reads both (docs/ngram.md; null: none)."""

    @property
    def looped(self) -> bool:
        """Whether a part of the model is looped."""
        return self.LOOPS is not None

    @property
    def loops(self) -> int:
        """Number of loops where a stage does not set it."""
        return attrgetter(self.LOOPS)(self) if self.LOOPS else 1

    @property
    def feed_forwards(self) -> int:
        """Number of layers with a feed-forward that `Model.ffn_down` returns."""
        return 0

    def shallow(self) -> ModelConfig:
        """Return the block of a model with few layers, one of each kind; here the block itself.

        The warm-up of a model that no device holds whole measures that one.
        """
        return self

    @property
    def recomputes(self) -> Any:
        """Value of the setting at `RECOMPUTE`."""
        return attrgetter(self.RECOMPUTE)(self) if self.RECOMPUTE else False

    def recomputing(self, way: Any = None) -> dict[str, Any]:
        """Return the changes of this block that set what is recomputed: the given value at `RECOMPUTE`, or
        what minimizes activation memory.

        The result is empty if that changes nothing.
        """
        block = self.MOST_RECOMPUTED if way is None else way
        if not self.RECOMPUTE or self.recomputes == block:
            return {}
        for key in reversed(self.RECOMPUTE.split(".")):
            block = {key: block}
        return block

    @property
    def most_recomputed(self) -> str:
        """`MOST_RECOMPUTED` as YAML text."""
        return str(self.MOST_RECOMPUTED).lower()

    def problems(self, precision: str, compiled: bool | None) -> list[str]:
        """Return the settings of a run that this model cannot have, each with its key: ``compile: ...``."""
        return []

    def shape_of_weights(self) -> dict[str, Any]:
        """Return the settings that two models must share to read each other's weights, as plain JSON."""
        plain = self.model_dump(mode="json")
        if self.RECOMPUTE:
            *blocks, key = self.RECOMPUTE.split(".")
            del reduce(getitem, blocks, plain)[key]
        return plain


def default_family() -> str:
    """Return the family of a block that names neither a family nor a preset."""
    return ModelConfig.model_fields["family"].default


@cache
def families() -> list[str]:
    """Return the names of the families that come with Spider."""
    return sorted(path.parent.name for path in Path(__file__).parents[1].glob("model/*/config.py"))


def family_module(family: str, module: str) -> ModuleType:
    """Import ``config`` or ``model`` of a family.

    Raises:
        ConfigError: the family does not exist, cannot be imported, or was not named by the user.
    """
    if family not in families() and not may_import(family):
        raise ConfigError(
            f"the family {family!r} is not one of Spider's ({', '.join(families())}) and not registered by "
            "an installed package, and importing it runs its code. If you trust that code, name the family: "
            f"spider --family-module {family}, spider.load_model(path, family_module={family!r}), or "
            "trust_remote_code=True in transformers"
        )
    package = f"spider.model.{family}" if family in families() else family
    return import_named("family", family, package, families(), module)


def family_config(family: str) -> type[ModelConfig]:
    """Return the schema of a family's block. Raise `ConfigError` like `family_module`."""
    config = getattr(family_module(family, "config"), "Config", None)
    if not (isinstance(config, type) and issubclass(config, ModelConfig)):
        raise ConfigError(f"family {family!r}: its config.py defines no Config, a spider.config.ModelConfig")
    return config


def presets(family: str) -> dict[str, dict[str, Any]]:
    """Return the presets of a family by name, each as the settings that differ from the defaults."""
    return getattr(family_module(family, "config"), "PRESETS", {})


def model_block(value: Any) -> Any:
    """Expand ``tiny`` or ``{preset: tiny, ...}`` into the preset's whole mapping, with its family's name.

    Raises:
        ValidationError: the family or the preset does not exist.
    """
    block = {"preset": value} if isinstance(value, str) else value
    if not isinstance(block, dict):
        return value
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
    """Merge two mappings key by key, recursively. A value of ``over`` replaces one of ``base``."""
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    return {**base, **{k: merged(base.get(k), v) for k, v in over.items()}}


def family_block(value: Any) -> Any:
    """Validate a mapping as the block of its family. Return other values as they are.

    Raises:
        ConfigError: the family cannot be imported.
        ValidationError: a key or a value is wrong.
    """
    if not isinstance(value, dict):
        return value
    return family_config(str(value.get("family", default_family()))).model_validate(value)


#: The block of a model of any family.
AnyModel = Annotated[SerializeAsAny[ModelConfig], BeforeValidator(family_block)]
