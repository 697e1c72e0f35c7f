"""The JSON schema of ``config.yaml`` for editors, generated from the blocks.

It accepts every valid configuration. It cannot check what depends on several keys; `load_config` does.
"""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from spider.config.block import Block
from spider.config.data import kinds, source_class
from spider.config.model import families, family_config, presets
from spider.config.run import OPTIMIZERS
from spider.config.schema import Config

#: A number with underscores or with an exponent. To an editor that reads YAML 1.2 it is text.
_NUMBER = r"^[-+]?[0-9][0-9_]*(\.[0-9]*)?([eE][-+]?[0-9]+)?$"
#: The import path of a module of the user.
_IMPORT_PATH = {"type": "string", "pattern": r"\."}


def json_schema() -> dict[str, Any]:
    """Return the schema of a whole configuration."""
    sources = {kind: source_class(kind) for kind in kinds()}
    models = {family: family_config(family) for family in families()}
    blocks: list[type[Block]] = [Config, *sources.values(), *models.values()]
    references, schema = models_json_schema([(block, "validation") for block in blocks])
    definitions = schema["$defs"]

    def refer(block: type[Block]) -> dict[str, Any]:
        return dict(references[block, "validation"])

    def define(block: type[Block]) -> dict[str, Any]:
        return definitions[refer(block)["$ref"].rpartition("/")[2]]  # type: ignore[no-any-return]

    for kind, source in sources.items():
        define(source)["properties"]["kind"] = {"const": kind}
    for family, model in models.items():
        names = sorted(presets(family))
        define(model)["properties"] |= {"family": {"const": family}, "preset": {"enum": names}}
    own_source = {"type": "object", "required": ["kind"], "properties": {"kind": _IMPORT_PATH}}
    own_model = {"type": "object", "required": ["family"], "properties": {"family": _IMPORT_PATH}}
    all_presets = {"enum": [name for family in models for name in sorted(presets(family))]}
    definitions["Source"] = {"anyOf": [*map(refer, sources.values()), own_source]}
    definitions["ModelConfig"] = {"anyOf": [all_presets, *map(refer, models.values()), own_model]}
    optimizer = definitions["OptimizerConfig"]
    definitions["OptimizerConfig"] = {"anyOf": [{"enum": sorted(OPTIMIZERS)}, optimizer]}
    definitions["Dataset"]["required"] = []
    definitions["Dataset"]["anyOf"] = [{"required": ["source"]}, {"required": ["like"]}]
    definitions["LadderConfig"]["required"] = ["rungs"]  # the rest may come from `like`
    whole = define(Config)
    return {"title": "Configuration of Spider", **_numbers_as_text({**whole, "$defs": definitions})}


def _numbers_as_text(schema: Any) -> Any:
    """Allow numbers that an editor reads as text: ``100_000`` and ``6e5``."""
    if isinstance(schema, list):
        return [_numbers_as_text(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: _numbers_as_text(value) for key, value in schema.items()}
    if schema.get("type") in ("integer", "number"):
        schema |= {"type": [schema["type"], "string"], "pattern": _NUMBER}
    return schema
