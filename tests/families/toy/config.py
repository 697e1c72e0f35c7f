from spider.config import ModelConfig
from spider.config.block import Positive


class Config(ModelConfig):
    width: Positive = 16
    """Of the embedding."""
