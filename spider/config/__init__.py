"""The schema of ``config.yaml``: one pydantic model a block, and the only home of defaults.

    block      what a block is, what its digests are made of, and errors in words
    data       datasets          run    runs and stages       model    families of models
    spec       a stage, resolved: what a job reads
    settings   a setting by its path; grids, which make many runs of one block
    schema     all of it, from a file and settings given beside it to a checked `Config`

A configuration names datasets and runs. A run trains one model through a list of stages; settings shared by
its stages stand in ``defaults`` and any stage may override any of them. ``Config.stage`` resolves that into a
`StageSpec`. Nothing here imports torch: the Snakefile loads it at every parse.
"""

from spider.config.block import FORMAT, Block, ConfigError, nearest
from spider.config.compress import CompressConfig
from spider.config.data import (
    Dataset,
    HubSource,
    LocalSource,
    MockSource,
    PydocsSource,
    StreamSource,
    TokenizerConfig,
    TokensSource,
)
from spider.config.model import ModelConfig, families, family_config, merged, presets
from spider.config.run import (
    EmaConfig,
    EvaluationConfig,
    Fp8Recipe,
    OptimizerConfig,
    Resources,
    Run,
    Stage,
    StageSettings,
    TrackingConfig,
    TTTConfig,
)
from spider.config.schema import Config, Given, load_config, with_settings
from spider.config.spec import StageSpec
from spider.config.tasks import HarnessConfig
