"""Write docs/config.md from the schema, so that the reference cannot differ from what is checked.

python docs/config_reference.py > docs/config.md
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from spider import config
from spider.config import Block, ModelConfig, families, family_config, presets, tasks
from spider.config.data import kinds, source_class

HEAD = """# Configuration reference

Made from the schema (`spider/config/`, and each family's `config.py` in `spider/model/`) by
`python docs/config_reference.py`; do not edit. Every key of `config.yaml` that is not listed here is refused.
Commented examples: [`config.yaml`](../config.yaml) and [`presets/`](../presets).
"""

#: Blocks in reading order, with where each stands in the file.
BLOCKS: list[tuple[str, type[Block]]] = [
    ("(top level)", config.Config),
    ("datasets.NAME", config.Dataset),
    *((f"datasets.NAME.source, kind: {kind}", source_class(kind)) for kind in kinds()),
    ("tokenizers.NAME", config.TokenizerConfig),
    ("runs.NAME", config.Run),
    ("runs.NAME.defaults, and each of runs.NAME.stages", config.Stage),
    ("runs.NAME.defaults.ema", config.EmaConfig),
    ("runs.NAME.optimizer", config.OptimizerConfig),
    ("runs.NAME.evaluation", config.EvaluationConfig),
    ("runs.NAME.evaluation.ttt", config.TTTConfig),
    ("runs.NAME.evaluation.tasks.NAME, kind: cloze", tasks.ClozeTask),
    ("runs.NAME.evaluation.tasks.NAME, kind: induction", tasks.InductionTask),
    ("runs.NAME.evaluation.tasks.NAME, kind: copy", tasks.CopyTask),
    ("runs.NAME.evaluation.tasks.NAME, kind: jsonl", tasks.JsonlTask),
    ("runs.NAME.evaluation.tasks.NAME, kind: core", tasks.CoreTask),
    ("runs.NAME.harness", config.HarnessConfig),
    ("runs.NAME.compress", config.CompressConfig),
    ("runs.NAME.resources", config.Resources),
    ("tracking", config.TrackingConfig),
]


def model_blocks(path: str, block: type[Block]) -> Iterator[tuple[str, type[Block]]]:
    """A family's block and those in it."""
    yield path, block
    for name, field in block.model_fields.items():
        for part in (field.annotation, *typing.get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, Block):
                yield from model_blocks(f"{path.split(',')[0]}.{name}", part)


def type_name(annotation: Any) -> str:
    """A type as a person would say it."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_name(arguments[0])
    if origin is typing.Literal:
        return " \\| ".join(f"`{a}`" for a in arguments)
    if origin in (typing.Union, types.UnionType):
        return " \\| ".join(dict.fromkeys("null" if a is type(None) else type_name(a) for a in arguments))
    if origin is list:
        return f"list of {type_name(arguments[0])}"
    if origin is tuple:
        return f"pair of {type_name(arguments[0])}"
    if origin is dict:
        return "mapping"
    if annotation is ModelConfig:
        return "preset or block"
    if isinstance(annotation, type) and issubclass(annotation, Block):
        return "block"
    return {int: "whole number", float: "number", str: "text", bool: "true or false"}[annotation]


def default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value is PydanticUndefined or isinstance(value, Block):
        return ""
    return f"`{json.dumps(value)}`"


def section(title: str, block: type[Block]) -> Iterator[str]:
    yield f"\n## `{title}`\n"
    yield " ".join((block.__doc__ or "").split()) + "\n"
    yield "| key | type | default | meaning |\n|---|---|---|---|"
    for name, field in block.model_fields.items():
        meaning = " ".join((field.description or "").split())
        yield f"| `{name}` | {type_name(field.annotation)} | {default(field)} | {meaning} |"


def reference() -> str:
    """The whole page as Markdown."""
    lines = [HEAD]
    for title, block in BLOCKS:
        lines += section(title, block)
    for family in families():
        for title, block in model_blocks(f"runs.NAME.model, family: {family}", family_config(family)):
            lines += section(title, block)
    lines.append("\n## Model presets\n")
    for family in families():
        for name, changes in presets(family).items():
            what = f"`{json.dumps(changes)}`" if changes else f"the defaults of the family `{family}`"
            lines.append(f"- `{name}`: {what}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(reference(), end="")
