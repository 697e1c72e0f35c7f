"""The names that the rest of Spider imports from `spider.config`."""

from spider.config.block import FORMAT, Block, ConfigError, nearest
from spider.config.data import Dataset, Source, TokenizerConfig
from spider.config.model import ModelConfig, families, family_config, merged, presets
from spider.config.run import (
    CompressConfig,
    EmaConfig,
    EvaluationConfig,
    GroupConfig,
    OptimizerConfig,
    RolloutConfig,
    Run,
    Stage,
    StageSettings,
    TTTConfig,
)
from spider.config.schema import Config, Given, load_config, with_settings
from spider.config.spec import StageSpec
