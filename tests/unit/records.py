"""Whole records as training writes them, of which a test names only what it is about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from spider.checkpoints.records import read_manifest
from spider.checkpoints.save import save
from spider.common.files import write_json
from spider.provenance.made import File, Job, Made, Process, Workflow, file_at, file_digest, made_path
from spider.tokens.stored import TOKENIZER


def saved(step: int = 1, **changes: Any) -> dict[str, Any]:
    """What `Trainer` says of a checkpoint beside its tensors, for `spider.checkpoints.save.save`."""
    precision = {"kind": "fp32", "reason": "configured", "layers": [], "recipe": None}
    numbers = dict.fromkeys(("tokens", "bytes", "seconds", "checkpoint_seconds", "skipped", "streak"), 0)
    numbers["global_tokens"] = 0
    words = {"run": "demo", "stage": "main", "identity": "i", "data_digest": "d", "device": "cpu"}
    nothing = dict.fromkeys(("parent_weights", "parallel", "end", "loss", "best_loss", "position"))
    rest = {"spec": {}, "final": False, "precision": precision, "means": {}}
    record = {**words, **numbers, **nothing, **rest}
    made_by = {"torch": "2", "threads": 1, "processes": 1}
    return record | made_by | {"step": step, "global_step": step} | changes


def saved_again(path: Path, change: Callable[[str], float], **record: Any) -> Path:
    """Save a checkpoint again with each tensor multiplied by what ``change`` gives for its name."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
    tensors = {name: t if (factor := change(name)) == 1 else t * factor for name, t in tensors.items()}
    before = read_manifest(path).model_dump(
        exclude={"format", "files", "digest", "weights", "averaged_weights"}
    )
    tokenizer = path / TOKENIZER
    return save(path.parent, tensors, before | record, tokenizer if tokenizer.exists() else None).path


def receipt(**changes: Any) -> dict[str, Any]:
    """A stage's ``train.json``."""
    numbers = dict.fromkeys(("tokens", "bytes", "seconds", "checkpoint_seconds", "skipped"), 0)
    words = {"run": "demo", "stage": "main", "identity": "i", "data_digest": "d", "device": "cpu"}
    nothing = dict.fromkeys(("averaged_weights", "position", "loss", "best_loss"))
    written = {"format": 1, **words, **numbers, **nothing, "precision": "fp32", "weights": "w"}
    return written | {"steps": 1, "global_step": 1, "checkpoint": "checkpoints/step-00000001"} | changes


def write_workflow(root: Path, identity: str = "20260101-000000-abcdef", **changes: Any) -> Workflow:
    """Write the record of an invocation of the workflow."""
    one = Workflow(
        identity=identity,
        started=1.7e9,
        ended=1.7e9 + 60,
        status="finished",
        process=Process(pid=1, created=0),
        config={},
        user="ada",
        version="1",
        commit="0123-dirty",
        packages={},
    )
    return one.model_copy(update=changes).write(root / "workflows" / f"{identity}.json")


def write_job(root: Path, output: str, inputs: Sequence[str] = (), **changes: Any) -> Job:
    """Record a run of the job that makes an output, after its earlier runs; write a missing output.

    Inputs are relative to the results folder, or absolute.
    """
    path = made_path(root, output)
    before = Made.read(path).jobs if path.exists() else []
    if not (root / output).exists():
        write_json(root / output, {"made": output})

    def hashed(name: str) -> File:
        return file_at(root, root / name).model_copy(update={"digest": file_digest(root / name)})

    job = Job(
        rule="encode",
        wildcards={"dataset": "d", "part": "000"},
        workflow="20260101-000000-abcdef",
        params={"identity": {"validation": 0.1}},
        inputs=[hashed(name) for name in inputs],
        outputs=[hashed(output)],
        command="data encode d 000",
        started=1.7e9 + 1 + 10 * len(before),
        ended=1.7e9 + 5 + 10 * len(before),
        status="finished",
    ).model_copy(update=changes)
    Made(params=[], jobs=[*before, job]).write(path)
    return job
