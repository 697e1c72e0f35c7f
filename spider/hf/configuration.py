"""``config.json`` of an exported folder as transformers reads it: our ``model`` block and what it needs."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import ValidationError
from transformers.configuration_utils import PreTrainedConfig

from spider.checkpoints.records import EXPORTED, Exported
from spider.checkpoints.transformers_files import MODEL_TYPE, config_keys
from spider.config import ModelConfig
from spider.config.block import key_path
from spider.config.model import default_family, family_block, may_import
from spider.tokens import BYTES

#: Ids to give a model at a time where its configuration does not say.
WINDOW = 1024
#: What an export says of a training, which is no longer true of what transformers saves.
_FOREIGN = {*Exported.model_fields} - {"model", "window", "conversations", "full_index"}


class SpiderHFConfig(PreTrainedConfig):
    """See the module's docstring.

    Args:
        model: a run's ``model`` block, of any family; without one, the default family's.
        window: ids that the model reads at a time, those that generation keeps of a text.
        n_loops: how often a looped part runs; without it, as often as in ``model``.
        conversations: the dataset of conversations that it was last trained on, if it was.
        full_index: digest of the n-gram index that it reads, if it reads one.
    """

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {"max_position_embeddings": "window"}

    model: dict[str, Any] | None = None
    window: int | None = None
    n_loops: int | None = None
    conversations: str | None = None
    full_index: str | None = None
    vocab_size: int | None = None
    bos_token_id: int | None = BYTES.bos
    eos_token_id: int | None = BYTES.eos
    pad_token_id: int | None = BYTES.pad

    def __post_init__(self, **kwargs: Any) -> None:
        self.window = self.window or WINDOW
        # The code of a family that nobody named must not run, and this is called before a model is asked for.
        read = may_import(self.family)
        ours = config_keys(self.block.vocab_size if read else (self.model or {}).get("vocab_size"))
        self.vocab_size = ours["vocab_size"]
        told = {name: value for name, value in kwargs.items() if name not in _FOREIGN}
        super().__post_init__(**told | {"auto_map": ours["auto_map"]})

    @property
    def family(self) -> str:
        """The family that the ``model`` block names."""
        return str((self.model or {}).get("family", default_family()))

    @property
    def block(self) -> ModelConfig:
        """Return the ``model`` block, checked.

        Raises:
            ValueError: a block of another version of Spider, or a family that may not be imported.
        """
        try:
            return family_block(self.model or {})
        except ValidationError as error:
            first = error.errors()[0]
            what = f"{key_path(('model', *first['loc']))}: {first['msg']}"
            raise ValueError(f"{EXPORTED}: a model of another version of Spider ({what})") from None

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Do nothing: the code that goes along is `REMOTE`, not the module of this class."""
