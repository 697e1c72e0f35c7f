"""Questions asked of a finished run: how many are right, how long it takes, and how long by the harness.

Of the last stage of a run (default: the default run's, in ``results``): three tasks of 200 questions of four
choices, made from its held-out text; then the first of them again as lm-evaluation-harness asks it, from the
same questions in a file.

    python benchmarks/tasks.py [--quick] [--json FILE] [--results FOLDER] [--run NAME]
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from common import parser, report

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

from spider.checkpoints.load import Checkpoint
from spider.config import load_config
from spider.config.tasks import ClozeTask, CopyTask, InductionTask
from spider.evaluation.harness import HarnessModel, ask
from spider.evaluation.held_out import validation_stream
from spider.evaluation.overlap import Text
from spider.evaluation.questions import Task, tasks
from spider.evaluation.tasks import run_task
from spider.results import Results

BATCH = 64


def text(raw: bytes) -> str:
    """A stretch may begin or end within a character, of which JSON can hold no half."""
    return raw.decode("utf-8", "replace")


def by_harness(task: Task, model: HarnessModel) -> dict[str, Any]:
    """Its figures of the same questions, and the seconds that it took."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            {"query": text(q.contexts[0]), "choices": [*map(text, q.choices)], "gold": q.gold}
            for q in task.questions
        ]
        (Path(folder) / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        files = {"data_files": {"test": f"{folder}/rows.jsonl"}, "cache_dir": f"{folder}/cache"}
        written = {
            **{"task": "same", "dataset_path": "json", "dataset_kwargs": files, "test_split": "test"},
            **{"doc_to_text": "query", "doc_to_choice": "choices", "doc_to_target": "gold"},
            **{"output_type": "multiple_choice", "target_delimiter": ""},
            "metric_list": [{"metric": "acc_bytes"}],
        }
        (Path(folder) / "same.yaml").write_text(yaml.safe_dump(written))
        began = time.perf_counter()
        told = ask(model, ["same"], include=Path(folder), label="it", weights="w")
        return {"seconds": time.perf_counter() - began, "by_byte": told.tasks[0].metrics["acc_bytes"].value}


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--results", type=Path, default=Path("results"))
    options.add_argument("--run", help="default: the first")
    asked = options.parse_args()
    results = Results(asked.results)
    config = load_config(asked.results / "config.yaml")
    run, _ = config.choose(asked.run or next(iter(config.runs)))
    spec = config.stage(run, config.runs[run].stages[-1].name)
    checkpoint = Checkpoint.at(results.stage(run, spec.stage).receipt)
    model, items = checkpoint.model(), 20 if asked.quick else 200
    data = results.shards(spec.evaluation.data or spec.data)
    tokens_N, _ = validation_stream(data, spec.evaluation.max_bytes, model.tokens)
    documents = Text.of(tokens_N, model.tokens).documents()
    rows, figures = [], {}
    made = {
        "cloze": ClozeTask(kind="cloze", items=items),
        "induction": InductionTask(kind="induction", items=items),
        "copy": CopyTask(kind="copy", items=items),
    }
    for name, block in made.items():
        (task,) = tasks(name, block, documents)
        warm = task._replace(questions=task.questions[:8])  # what a first call loads is no cost of it
        run_task(model, warm, window=spec.window, batch=BATCH, **checkpoint.reading)
        began = time.perf_counter()
        one = run_task(model, task, window=spec.window, batch=BATCH, **checkpoint.reading)
        seconds = time.perf_counter() - began
        right = f"{100 * one.by_byte:.1f} ± {100 * one.standard_error:.1f}%"
        rows.append([name, str(items), right, f"{one.centered:.3f}", f"{seconds:.1f}"])
        figures[name] = {"seconds": seconds, **one.model_dump()}
        if name == "cloze":
            harness = HarnessModel(model, window=spec.window, batch=BATCH, overlap=0.5, **checkpoint.reading)
            figures["harness"] = same = by_harness(task, harness)
            right, ratio = f"{100 * same['by_byte']:.1f}%", f"{same['seconds'] / seconds:.2f}x"
            rows.append(["cloze, by the harness", str(items), right, "", ratio])
    title = f"{checkpoint.label}, windows of {spec.window}, four choices each"
    report(title, ["task", "questions", "right", "beyond chance", "seconds"], rows, figures, asked, ["torch"])


if __name__ == "__main__":
    main()
