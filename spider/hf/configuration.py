"""The configuration of an exported folder for transformers: the ``model`` block and the keys it requires."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import ValidationError
from transformers.configuration_utils import PreTrainedConfig

from spider.checkpoints.records import EXPORTED, Exported
from spider.common.record import key_path
from spider.config import ModelConfig
from spider.config.model import default_family, family_block, may_import
from spider.publish.transformers_files import MODEL_TYPE, config_keys
from spider.tokens import BYTES

#: How many ids a model reads at a time if its configuration does not say.
WINDOW = 1024
#: Fields about the training, which do not apply to a model that transformers saves.
_KEPT = {"model", "window", "precision", "n_loops", "conversations", "full_index"}
_DROPPED = {*Exported.model_fields} - _KEPT


class SpiderHFConfig(PreTrainedConfig):
    """The configuration of a model of any family.

    Args:
        model: the ``model`` block of a run; None is the default family.
        window: how many ids the model reads at a time in generation.
        n_loops: how often a looped part runs; None is the value in ``model``.
        precision: the precision of the model's score, fp32 or bf16; weights are fp32 in either case.
        conversations: the dataset of conversations that the model was last trained on, or None.
        full_index: digest of the n-gram index that the model reads, or None.
    """

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {"max_position_embeddings": "window"}

    model: dict[str, Any] | None = None
    window: int | None = None
    n_loops: int | None = None
    precision: str | None = None
    conversations: str | None = None
    full_index: str | None = None
    vocab_size: int | None = None
    bos_token_id: int | None = BYTES.bos
    eos_token_id: int | None = BYTES.eos
    pad_token_id: int | None = BYTES.pad

    def __post_init__(self, **kwargs: Any) -> None:
        self.window = self.window or WINDOW
        # Reading a configuration must not import a family that the user has not allowed.
        allowed = may_import(self.family)
        vocab_size = self.block.vocab_size if allowed else (self.model or {}).get("vocab_size")
        keys = config_keys(vocab_size)
        self.vocab_size = keys["vocab_size"]
        others = {name: value for name, value in kwargs.items() if name not in _DROPPED}
        others["auto_map"] = keys["auto_map"]
        super().__post_init__(**others)

    @property
    def family(self) -> str:
        """Return the family that the ``model`` block names."""
        return str((self.model or {}).get("family", default_family()))

    @property
    def block(self) -> ModelConfig:
        """Return the validated ``model`` block.

        Raises:
            ValueError: the block is of another version of Spider, or its family may not be imported.
        """
        try:
            return family_block(self.model or {})
        except ValidationError as error:
            first = error.errors()[0]
            what = f"{key_path(('model', *first['loc']))}: {first['msg']}"
            raise ValueError(f"{EXPORTED}: a model of another version of Spider ({what})") from None

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Do nothing: exported folders hold `REMOTE` instead of the module of this class."""
