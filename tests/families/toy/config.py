from typing import ClassVar

from spider.config import ModelConfig
from spider.config.block import Positive


class Config(ModelConfig):
    ANY_TOKENS: ClassVar[bool] = True

    width: Positive = 16
    """Width of the embedding."""
