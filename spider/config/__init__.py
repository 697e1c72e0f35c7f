"""The schema of ``config.yaml``: one pydantic model a block, and the only home of defaults.

    block     what a block is, and what its digests are made of
    data      datasets          run    runs and stages       model    families of models
    spec      a stage, resolved: what a job reads            schema   all of it
    paths     a setting by its path                          grid     many runs from one block
    load      from a file, and settings given beside it, to a checked `Config`
    explain   what is wrong, in words

A configuration names datasets and runs. A run trains one model through a list of stages; settings shared by
its stages stand in ``defaults`` and any stage may override any of them. ``Config.stage`` resolves that into a
`StageSpec`. Nothing here imports torch: the Snakefile loads it at every parse.
"""

from spider.config.block import FORMAT, Block
from spider.config.data import Dataset, HubSource, LocalSource, MockSource, PydocsSource, StreamSource
from spider.config.explain import ConfigError, nearest
from spider.config.load import Given, load_config, with_settings
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
)
from spider.config.schema import Config
from spider.config.spec import StageSpec
