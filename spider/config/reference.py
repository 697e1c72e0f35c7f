"""The JSON schema of ``config.yaml`` for editors, and the reference of all keys for people.

Both are made from the blocks. The schema accepts every valid configuration. It cannot check what depends on
several keys; `load_config` does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic.json_schema import models_json_schema

from spider.common import extras
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
    return _numbers_as_text(_schema())  # type: ignore[no-any-return]


def _schema() -> dict[str, Any]:
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
    whole = define(Config)
    about = "A block of an extra, whose page has its keys (extras/)."
    whole["properties"] |= {key: {"type": "object", "description": about} for key in extras.config_keys()}
    return {**whole, "title": "Configuration of Spider", "$defs": definitions}


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


def reference() -> str:
    """Return all keys of a configuration as Markdown, a table for each block."""
    whole = _schema()
    blocks = {f"#/$defs/{name}": block for name, block in whole["$defs"].items()}
    lines = ["# Configuration reference", *_table(whole)]
    waiting, seen = [(path, name, "") for path, name in _references("", whole)], set[str]()
    while waiting:
        path, name, of = waiting.pop(0)
        if name in seen:
            continue
        seen.add(name)
        for block in (blocks[name], *blocks[name].get("anyOf", ())):
            if "title" in block and "properties" in block:
                kinds = [
                    f", {key}: {one['const']}" for key, one in block["properties"].items() if "const" in one
                ]
                of = "".join(kinds) or of
                title = f"## `{path}{of}`"
                title = title if title not in lines else f"## `{path}{of}, with {block['required'][0]}`"
                lines += ["", title, *_table(block)]
            waiting += [(*one, of) for one in _references(path, block)]
    return "\n".join(lines) + "\n"


def _references(path: str, schema: Any) -> Iterator[tuple[str, str]]:
    """Yield the path of each block that a schema refers to, and its name; NAME stands for any key."""
    if "$ref" in schema:
        yield path, schema["$ref"]
    for key, one in schema.get("properties", {}).items():
        yield from _references(f"{path}.{key}" if path else key, one)
    if isinstance(schema.get("additionalProperties"), dict):
        yield from _references(f"{path}.NAME", schema["additionalProperties"])
    for one in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *filter(None, [schema.get("items")])):
        yield from _references(path, one)


def _table(block: dict[str, Any]) -> Iterator[str]:
    yield "\n" + " ".join(block.get("description", "").split())
    yield "\n| key | type | default | meaning |\n|---|---|---|---|"
    for key, one in block["properties"].items():
        default = f"`{json.dumps(one['default'])}`" if "default" in one else ""
        default = "required" if key in block.get("required", ()) else default
        meaning = " ".join(one.get("description", "").split()).replace("|", "\\|")
        yield f"| `{key}` | {_type(one)} | {default} | {meaning} |"


def _type(schema: dict[str, Any]) -> str:
    """Return the name of a type in the tables."""
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(map(_type, choices)))
    if "enum" in schema or "const" in schema:
        return " or ".join(f"`{one}`" for one in schema.get("enum", [schema.get("const")]))
    if "$ref" in schema:
        return "block"
    if schema.get("type") == "array" and "items" in schema:
        return f"list of {_type(schema['items'])}"
    return {"string": "text", "object": "mapping", "array": "list"}.get(*[schema.get("type", "any")] * 2)
