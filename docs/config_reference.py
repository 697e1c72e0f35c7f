"""Write docs/config.md from the schema, so that the reference agrees with the validation.

python docs/config_reference.py > docs/config.md
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from spider import config
from spider.config import Block, ModelConfig, families, family_config, presets, tasks
from spider.config.cleaning import Cleaning, DecontaminateConfig, NearConfig
from spider.config.data import SplitBy, kinds, source_class
from spider.config.ladders import LadderConfig, RungConfig
from spider.config.model import model_block
from spider.config.ngram import NgramConfig
from spider.config.run import Mixture, Switch

HEAD = """# Configuration reference

All keys of `config.yaml`, with type, default and unit. Any other key is refused. The chapters stand in the
order of need. In each table the keys that [`config.yaml`](../config.yaml) or one of the
[`presets/`](../presets) sets come first; most examples are theirs. `spider config schema` prints the JSON
schema for editors, [`config.schema.json`](config.schema.json); the first line of a configuration names it.

This page is generated from the schema (`spider/config/` and each family's `config.py` in `spider/model/`) by
`python docs/config_reference.py`; do not edit it.
"""

#: Blocks by chapter, with the path of each in the file.
CHAPTERS: dict[str, list[tuple[str, type[Block]]]] = {
    "Data and runs": [
        ("(top level)", config.Config),
        ("datasets.NAME", config.Dataset),
        *((f"datasets.NAME.source, kind: {kind}", source_class(kind)) for kind in ("pydocs", "local", "hub")),
        ("runs.NAME", config.Run),
        ("runs.NAME.defaults, and each of runs.NAME.stages", config.Stage),
        ("runs.NAME.data, and data of a stage, of several datasets", Mixture),
        ("runs.NAME.data.switches", Switch),
        ("ladders.NAME, beside the keys of a run", LadderConfig),
        ("ladders.NAME.rungs, and target", RungConfig),
    ],
    "Training": [
        ("runs.NAME.optimizer", config.OptimizerConfig),
        ("runs.NAME.optimizer.groups.NAME", config.GroupConfig),
        ("runs.NAME.resources", config.Resources),
        ("datasets.NAME.split_by", SplitBy),
        ("datasets.NAME.cleaning", Cleaning),
        ("datasets.NAME.cleaning.near", NearConfig),
        ("datasets.NAME.cleaning.decontaminate", DecontaminateConfig),
        ("tokenizers.NAME", config.TokenizerConfig),
        ("runs.NAME.defaults.ema", config.EmaConfig),
        ("runs.NAME.defaults.rollouts", config.RolloutConfig),
    ],
    "Evaluation": [
        ("runs.NAME.evaluation", config.EvaluationConfig),
        ("runs.NAME.compress", config.CompressConfig),
        ("runs.NAME.evaluation.ttt", config.TTTConfig),
        ("runs.NAME.evaluation.mixer", config.MixerConfig),
        ("runs.NAME.evaluation.tasks.NAME, made from the text", tasks.TextTask),
        ("runs.NAME.evaluation.tasks.NAME, kind: jsonl", tasks.JsonlTask),
        ("runs.NAME.evaluation.tasks.NAME, kind: core", tasks.CoreTask),
        ("runs.NAME.harness", config.HarnessConfig),
        ("foreign.NAME", config.ForeignConfig),
        ("tracking", config.TrackingConfig),
    ],
    "Other sources": [
        (f"datasets.NAME.source, kind: {kind}", source_class(kind))
        for kind in kinds()
        if kind not in ("pydocs", "local", "hub")
    ],
}

#: Examples of blocks that neither config.yaml nor a preset has, by their path.
EXAMPLES: dict[str, str] = {
    "runs.NAME.defaults.rollouts": "{samples: 8, max_bytes: 8, reward: last_number}",
    "(top level)": """
        results: results
        datasets:
          docs: {source: {kind: pydocs}}
        runs:
          demo: {data: docs, model: tiny, stages: [{name: main, tokens: 1_000_000}]}
        tracking: {enabled: false}
    """,
    "datasets.NAME": """
        {source: {kind: local, files: [texts/*.jsonl], take: 1 GB}, validation: 0.01,
        split_by: {column: url, pattern: "//([^/]+)"}, license: odc-by, language: en}
    """,
    "datasets.NAME.cleaning": "{filters: [bytes >= 200, language == en], exact: true}",
    "datasets.NAME.cleaning.near": "{containment: 0.8}",
    "datasets.NAME.cleaning.decontaminate": "{words: 13, action: report}",
    "datasets.NAME.source, kind: hub": """
        {kind: hub, repo: HuggingFaceFW/fineweb-edu, revision: 87f09149ef4734204d70ed1d046ddc9ca3f2b8f9,
        files: [sample/10BT/*.parquet], lock: fineweb.lock.json, take: 30 MB}
    """,
    "datasets.NAME.source, kind: local": "{kind: local, files: [texts/*.jsonl]}",
    "datasets.NAME.source, kind: mock": "{kind: mock, documents: 500}",
    "datasets.NAME.source, kind: stream": """
        {kind: stream, repo: HuggingFaceFW/fineweb-edu, revision: 87f09149ef4734204d70ed1d046ddc9ca3f2b8f9,
        files: [sample/10BT/000_00000.parquet]}
    """,
    "datasets.NAME.source, kind: tokens": """
        {kind: tokens, train: [shards/train_*.bin], validation: [shards/val_*.bin],
        model: shards/pieces.model, vocab_size: 1284}
    """,
    "runs.NAME.optimizer.groups.NAME": "{lr_ratio: 75.0, width_exponent: -0.5, betas: [0.8, 0.95]}",
    "runs.NAME.data, and data of a stage, of several datasets": """
        {mix: {web: 0.8, code: 0.2}, max_epochs: {code: 2}}
    """,
    "runs.NAME.data.switches": "[{sample: 100_000, mix: {web: 0.5, code: 0.5}}]",
    "ladders.NAME": """
        {data: docs, model: gpt-cpu, stages: [{name: main}], size: model.hidden,
        links: {lr: 0.032 * sqrt(64 / hidden)}, rungs: [{flops: 1.0e+11, sizes: [8, 16, 32], seeds: [1, 2]},
        {flops: 3.0e+11, sizes: [16, 32, 48]}], target: {flops: 3.0e+12, sizes: [64]}}
    """,
    "ladders.NAME.rungs": "[{flops: 1.0e+11, sizes: [8, 16, 32], seeds: [1, 2]}]",
    "runs.NAME.defaults.ema": "{decay: 0.997, start_step: 500}",
    "runs.NAME.evaluation.ttt": "{chunk: 4096, lr: 0.005, parameters: ffn_down}",
    "runs.NAME.evaluation.mixer": "{prime: 200_000}",
    "runs.NAME.evaluation.tasks.NAME, made from the text": "{kind: cloze, items: 500}",
    "runs.NAME.evaluation.tasks.NAME, kind: jsonl": "{kind: jsonl, file: questions.jsonl, shots: 5}",
    "runs.NAME.evaluation.tasks.NAME, kind: core": "{kind: core, folder: eval_bundle, items: 200}",
    "runs.NAME.harness": "{tasks: [lambada_openai, hellaswag], items: 500}",
    "foreign.NAME": "{model: models/gpt2, like: gpt}",
    "tracking": '{uri: "http://mlflow.example:5000", experiment: ada}',
    "runs.NAME.model.moe, family: spider": "{experts: 16, top_k: 2, expert_hidden: 256}",
    "runs.NAME.model.ngram": "{contexts: [1, 2, 3, 4, 5, 6, 8, words1], candidates: 8}",
}

ROOT = Path(__file__).parents[1]
#: The configurations of the project, config.yaml first.
CONFIGURATIONS = [
    yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in (ROOT / "config.yaml", *sorted((ROOT / "presets").glob("*.yaml")))
]


# ------------------------------------------------------------------------------------------------- examples


def found_at(plain: Any, path: list[str]) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield each value at a path, in which NAME stands for any key, alone and inside of its mappings."""
    if not path:
        yield plain, plain
    elif isinstance(plain, dict):
        for name in list(plain) if path[0] == "NAME" else [path[0]]:
            if name in plain:
                yield from (({name: outer}, value) for outer, value in found_at(plain[name], path[1:]))


def values(title: str) -> list[tuple[dict[str, Any], Any]]:
    """Return what the project's configurations have at the path in a title, as `found_at` does."""
    path, _, condition = title.partition(", ")
    key, _, wanted = condition.partition(": ")
    found = []
    for plain in CONFIGURATIONS:
        for outer, value in found_at(plain, path.split(".")):
            if key == "family":
                (run,) = outer["runs"]
                if model_block(plain["runs"][run]["model"])["family"] != wanted:
                    continue
            elif key == "kind" and value["kind"] != wanted:
                continue
            found.append((outer, value))
    return found


def example(title: str) -> tuple[dict[str, Any], Any]:
    """Return an example of a block, inside of the mappings around it and alone."""
    written = EXAMPLES.get(title) or EXAMPLES.get(title.partition(", ")[0])
    if written is None:
        if title.startswith("runs.NAME.defaults, "):
            run = CONFIGURATIONS[0]["runs"]["spider-ngram"]
            shown = {"defaults": run["defaults"], "stages": run["stages"]}
            return {"runs": {"demo": shown}}, {**run["defaults"], **run["stages"][0]}
        return max(values(title), key=lambda pair: len(pair[1]) if isinstance(pair[1], dict) else 0)
    value = yaml.safe_load(written)
    if title == "(top level)":
        return value, value
    outer = value
    for step in reversed(title.partition(", ")[0].split(".")):
        outer = {"mine" if step == "NAME" else step: outer}
    return outer, value[0] if isinstance(value, list) else value


def used_keys(title: str) -> set[str]:
    """Return the keys of a block that the project's configurations set."""
    if title == "(top level)":
        return {key for plain in CONFIGURATIONS for key in plain}
    titles = [title]
    if title.startswith("runs.NAME.defaults, "):
        titles = ["runs.NAME.defaults", "runs.NAME.stages"]
    used: set[str] = set()
    for one in titles:
        for _, value in values(one):
            for block in value if isinstance(value, list) else [value]:
                used |= set(block) if isinstance(block, dict) else set()
    return used


# ---------------------------------------------------------------------------------------------------- tables


def model_blocks(path: str, family: str, block: type[Block]) -> Iterator[tuple[str, type[Block]]]:
    """Yield the block of a family and its own blocks inside, with their titles."""
    yield f"{path}, family: {family}", block
    for name, field in block.model_fields.items():
        for part in (field.annotation, *typing.get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, Block) and part is not NgramConfig:
                yield from model_blocks(f"{path}.{name}", family, part)


def type_name(annotation: Any) -> str:
    """Return the name of a type in the tables."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
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
    if annotation in (ModelConfig, config.OptimizerConfig):
        return "preset or block"
    if isinstance(annotation, type) and issubclass(annotation, Block):
        return "block"
    return {int: "integer", float: "number", str: "text", bool: "true or false"}[annotation]


def default(field: FieldInfo) -> str:
    """Return the default of a key in the tables."""
    if field.is_required():
        return "required"
    value = field.default
    if value is PydanticUndefined or isinstance(value, Block):
        return ""
    return f"`{json.dumps(value)}`"


def section(title: str, block: type[Block]) -> Iterator[str]:
    """Yield the description, the example and the table of one block."""
    yield f"\n### `{title}`\n"
    yield " ".join((block.__doc__ or "").split()) + "\n"
    outer, _ = example(title)
    written = yaml.safe_dump(outer, sort_keys=False, default_flow_style=None, width=100, allow_unicode=True)
    yield f"```yaml\n{written}```\n"
    yield "| key | type | default | meaning |\n|---|---|---|---|"
    used = used_keys(title)
    elsewhere = set(config.Run.model_fields) if block is LadderConfig else set()
    for name, field in sorted(block.model_fields.items(), key=lambda item: item[0] not in used):
        if name in elsewhere:
            continue
        meaning = " ".join((field.description or "").split())
        yield f"| `{name}` | {type_name(field.annotation)} | {default(field)} | {meaning} |"


def chapters() -> dict[str, list[tuple[str, type[Block]]]]:
    """Return all blocks by chapter."""
    models = [
        block
        for family in sorted(families(), key=lambda family: family != "spider")
        for block in model_blocks("runs.NAME.model", family, family_config(family))
    ]
    return {**CHAPTERS, "Models": [*models, ("runs.NAME.model.ngram", NgramConfig)]}


def reference() -> str:
    """Return the page as Markdown."""
    lines = [HEAD]
    for chapter, blocks in chapters().items():
        lines.append(f"\n## {chapter}")
        for title, block in blocks:
            lines += section(title, block)
    lines.append("\n### Presets of models\n")
    for family in families():
        for name, changes in presets(family).items():
            what = f"`{json.dumps(changes)}`" if changes else f"the defaults of the family `{family}`"
            lines.append(f"- `{name}`: {what}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(reference(), end="")
