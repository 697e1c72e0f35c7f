"""40 pairs of runs that differ in one thing each: `spider diff` has to name this thing and nothing else.

    python -m benchmarks.diff [FOLDER]

Most pairs are runs of one configuration, which one invocation of the workflow trains. A pair whose data,
code, packages or threads differ has a results folder of its own.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import PROGRAMS, ROOT, show
from spider.common.files import write_json
from spider.config.model import merged
from spider.provenance.differences import Comparison
from spider.provenance.lineage import Lineage, result_of
from tests import forkserver

Config = dict[str, Any]

_TEXT = {
    "source": {"kind": "local", "files": ["text.jsonl"]},
    "validation": 0.2,
    "split_by": {"column": "site"},
}
_RUN: Config = {
    "data": "text",
    "model": {
        "preset": "gpt-d12", "hidden": 32, "layers": 2, "heads": 2, "ffn_ratio": 1, "short_window": 16,
    },
    "precision": "fp32",
    "defaults": {"seq_len": 32, "micro_batch": 4, "lr": 1e-3, "ckpt_every": 10, "val_every": 0},
    "stages": [
        {"name": "first", "max_steps": 6, "schedule": "constant", "warmup_steps": 2},
        {"name": "second", "max_steps": 6, "schedule": "linear", "warmup_steps": 0},
    ],
    "evaluation": {"max_bytes": 2000, "loops_bytes": 0, "sample_bytes": 0, "carry_over": 0},
    "resources": {"threads": 1},
}  # fmt: skip
BASE: Config = {"datasets": {"text": _TEXT}, "runs": {"base": _RUN}}
_NGRAM = {"contexts": [1, 2, 4, 6], "rare": 5, "matches": [2, 4], "hidden": 8, "state": 8}
#: Runs that pairs start from, as changes of the base run.
BASES: Config = {
    "base": {},
    "tokens": {"data": "tokens"},
    "mixed": {"data": {"mix": {"text": 1, "other": 1}}},
    "counted": {"data": "counted", "model": {"ngram": _NGRAM}},
    "small-file": {"compress": {"bits": 6, "clip": 3.0}},
    "asked": {"evaluation": {"tasks": {"quiz": {"file": "quiz.jsonl"}}}},
}
DATASETS: Config = {
    "other": {**_TEXT, "source": {"kind": "local", "files": ["other.jsonl"]}},
    "tokens": {"like": "text", "tokenizer": "small"},
    "counted": {**_TEXT, "ngram": 0.4},
}


@dataclass(frozen=True)
class Pair:
    """A run that differs from another one in one thing."""

    name: str
    cause: tuple[str, str]
    """Kind and name of the only cause."""
    run: Config | None = None
    """Changes of the run."""
    of: str = "base"
    data: Config | None = None
    """Changes of its dataset."""
    more: Config | None = None
    """Further blocks of the configuration."""
    stage: str = "second"
    change: Callable[[Path], dict[str, str]] | None = None
    """Change a folder with a copy of text and code before its workflow runs; return environment variables."""


def _setting(name: str, run: Config, what: str, **rest: Any) -> Pair:
    return Pair(name, ("setting", what), run, **rest)


def _data(name: str, what: str, change: Config) -> Pair:
    return Pair(name, ("setting", what), data=change)


def _stages(index: int, change: Config) -> Config:
    stages = copy.deepcopy(_RUN["stages"])
    stages[index] |= change
    return {"stages": stages}


def _edited(line: int, text: str | None, also: str = "") -> Callable[[Path], dict[str, str]]:
    """Return a function that edits a line of the text (None: removes it)."""

    def edit(folder: Path) -> dict[str, str]:
        lines = (folder / "text.jsonl").read_text().splitlines(keepends=True)
        lines[line : line + 1] = [] if text is None else [lines[line].replace("Document", text)]
        (folder / "text.jsonl").write_text("".join(lines) + also)
        return {}

    return edit


def _code(*commands: str) -> Callable[[Path], dict[str, str]]:
    """Return a function that edits a module in a copy of the checkout."""

    def edit(folder: Path) -> dict[str, str]:
        code = folder / "code"
        subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(code)], check=True)
        module = code / "spider/training/loop.py"
        module.write_text(module.read_text() + "\n_EDITED = True\n")
        for command in commands:
            subprocess.run(["git", "-C", str(code), *command.split()], check=True, stdout=subprocess.DEVNULL)
        return {"PYTHONPATH": str(code)}

    return edit


def _package(version: str) -> Callable[[Path], dict[str, str]]:
    def install(folder: Path) -> dict[str, str]:
        information = folder / f"packages/lent-{version}.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: lent\nVersion: {version}\n")
        return {"PYTHONPATH": str(folder / "packages")}

    return install


_NEW = json.dumps({"id": "new", "site": "s1", "text": "Another document.", "short": "Other"}) + "\n"
_COMMIT = "-c user.name=a -c user.email=a@b commit -q -a -m edit"

PAIRS = [
    # ---- what the models learn from
    Pair("a document edited", ("file", "text.jsonl"), change=_edited(3, "Text")),
    Pair("a document added", ("file", "text.jsonl"), change=_edited(-1, "Document", also=_NEW)),
    Pair("a document removed", ("file", "text.jsonl"), change=_edited(5, None)),
    _data("column of the text", "text_column", {"text_column": "short"}),
    _data("validation share", "validation", {"validation": 0.3}),
    _data("salt of the split", "split_by.salt", {"split_by": {"column": "site", "salt": 4}}),
    _data("column of the split", "split_by.column", {"split_by": {"column": "id"}}),
    _data("truncation", "max_document_bytes", {"max_document_bytes": 80}),
    _data("cleaning filter", "cleaning.filters", {"cleaning": {"filters": ["bytes >= 140"]}}),
    _data("exact duplicates", "cleaning.exact", {"cleaning": {"exact": True}}),
    _setting("tokenizer size", {"data": "tokens-2"}, "vocab_size", of="tokens", more={
        "datasets": {"tokens-2": {"like": "text", "tokenizer": "large"}},
        "tokenizers": {"large": {"data": "text", "vocab_size": 300}}}),
    Pair("another dataset", ("file", "text.jsonl"), {"data": "other"}),
    _setting("mixture weights", {"data": {"mix": {"other": 3}}}, "data.mix.other", of="mixed"),
    # ---- how they are trained
    _setting("seed", {"seed": 1}, "seed"),
    _setting("learning rate", {"defaults": {"lr": 2e-3}}, "lr"),
    _setting("optimizer", {"optimizer": {"kind": "muon"}}, "optimizer.kind"),
    _setting("weight decay", {"optimizer": {"weight_decay": 0.3}}, "optimizer.weight_decay"),
    _setting("steps", _stages(1, {"max_steps": 8}), "max_steps"),
    _setting("batch", {"defaults": {"micro_batch": 8}}, "micro_batch"),
    _setting("accumulation", {"defaults": {"grad_accum": 2}}, "grad_accum"),
    _setting("seq_len", {"defaults": {"seq_len": 64}, "evaluation": {"seq_len": 32}}, "seq_len", of="window"),
    _setting("packing", {"defaults": {"packing": "best_fit"}}, "packing"),
    _setting("order", {"defaults": {"order": "text"}}, "order"),
    _setting("width", {"model": {"hidden": 48}}, "model.hidden"),
    _setting("depth", {"model": {"layers": 3}}, "model.layers"),
    _setting("precision", {"precision": "bf16"}, "precision"),
    _setting("schedule", _stages(1, {"schedule": "cosine"}), "schedule"),
    _setting("moving average", {"defaults": {"ema": {"decay": 0.5}}}, "ema.decay"),
    _setting("an earlier stage", _stages(0, {"warmup_steps": 4}), "warmup_steps"),
    Pair("another stage", ("stage", "third"), {"stages": [
        *_RUN["stages"], {"name": "third", "max_steps": 4, "warmup_steps": 0}]}, stage="third"),
    _setting("n-gram contexts", {"model": {"ngram": {"contexts": [1, 2, 3]}}}, "model.ngram.contexts",
             of="counted"),
    _setting("n-gram head", {"model": {"ngram": {"state": 12}}}, "model.ngram.state", of="counted"),
    # ---- where, and by what code
    Pair("threads", ("threads", ""), {"resources": {"threads": 2}}),
    Pair("an edited module", ("module", "spider/training/loop.py"), change=_code()),
    Pair("an edited module, committed", ("module", "spider/training/loop.py"), change=_code(_COMMIT)),
    Pair("a package", ("package", "lent"), change=_package("2.0")),
    # ---- how they are measured
    _setting("overlap", {"evaluation": {"overlap": 0.25}}, "overlap"),
    Pair("evaluation text", ("file", "text.jsonl"), {"evaluation": {"data": "other"}}),
    Pair("a file of a task", ("file", "quiz.jsonl"), {
        "evaluation": {"tasks": {"quiz": {"file": "quiz-2.jsonl"}}}}, of="asked"),
    _setting("bits of the file", {"compress": {"bits": 5}}, "bits", of="small-file",
             stage="second/compressed"),
]  # fmt: skip
#: The base of the pair `seq_len`, which is evaluated with the same windows.
BASES["window"] = {"evaluation": {"seq_len": 32}}


def write_texts(folder: Path) -> None:
    """Write the texts and questions of all pairs into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, numbers in (("text", range(120)), ("other", range(500, 620))):
        with open(folder / f"{name}.jsonl", "w") as file:
            for i in numbers:
                words = " ".join(str(i * j % 97) for j in range(20 + i % 30))
                text = f"Document {i - i % 10 if i % 10 == 1 else i} says: {words}"
                row = {"id": str(i), "site": f"s{i % 30}", "text": text, "short": f"{words} {i}"}
                file.write(json.dumps(row) + "\n")
                if i % 20 == 7:
                    file.write(json.dumps({**row, "id": f"copy of {i}"}) + "\n")
    for name, gold in (("quiz", 0), ("quiz-2", 1)):
        question = {"query": "Document", "choices": [" 1 says", " x"], "gold": gold}
        (folder / f"{name}.jsonl").write_text(json.dumps(question) + "\n")


def configuration(pairs: Sequence[Pair]) -> Config:
    """Return the configuration of all runs that share a results folder."""
    raw = merged(BASE, {"datasets": DATASETS, "tokenizers": {"small": {"data": "text", "vocab_size": 280}}})
    raw["runs"] = {name: merged(_RUN, change) for name, change in BASES.items()}
    for i, pair in enumerate(pairs):
        if pair.change:
            continue
        run = merged(raw["runs"][pair.of], pair.run or {})
        if pair.data:
            raw["datasets"][f"text-{i}"] = merged(_TEXT, pair.data)
            run["data"] = f"text-{i}"
        raw = merged(raw, pair.more or {})
        raw["runs"][f"run-{i}"] = run
    if not any(pair.of == "tokens" for pair in pairs):
        del raw["datasets"]["tokens"], raw["tokenizers"]
    used = {pair.of for pair in pairs} | {"base"}
    raw["runs"] = {name: run for name, run in raw["runs"].items() if name in used or name not in BASES}
    return raw


def run_workflow(folder: Path, raw: Config, targets: Sequence[str], environment: dict[str, str]) -> None:
    """Run the workflow in a folder. Without other code its processes are forked, which is faster."""
    write_json(folder / "config.json", raw)
    code = Path(environment.get("PYTHONPATH", ROOT))
    code = code if (code / "Snakefile").exists() else ROOT
    command = [str(PROGRAMS / "snakemake"), "--snakefile", str(code / "Snakefile")]
    command += ["--configfile", "config.json", "--profile", str(code / "profiles/default"), "--quiet", "all"]
    command = [forkserver.python()] * (code == ROOT) + command
    variables = {**os.environ, **environment, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--", *targets], cwd=folder, env=variables, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stdout)


def target(run: str, stage: str) -> str:
    return f"results/runs/{run}/{stage}/evaluation.json"


def make(folder: Path, pairs: Sequence[Pair]) -> None:
    """Train all runs of the pairs in a folder. What is finished is not done again."""
    shared = folder / "shared"
    if not shared.exists():
        write_texts(shared)
    targets = [
        target(run, pair.stage.replace("third", "second") if run in BASES else pair.stage)
        for i, pair in enumerate(pairs)
        if not pair.change
        for run in (pair.of, f"run-{i}")
    ]
    base = target("base", "second")
    run_workflow(shared, configuration(pairs), list(dict.fromkeys([base, *targets])), {})
    for i, pair in enumerate(pairs):
        own = folder / f"pair-{i}"
        if pair.change and not (own / base).exists():
            shutil.rmtree(own, ignore_errors=True)
            write_texts(own)
            run_workflow(own, merged(BASE, {}), [base], pair.change(own))


def causes(folder: Path, pairs: Sequence[Pair], i: int) -> tuple[list[tuple[str, str]], list[str], float]:
    """Return the causes that are found for a pair, as they are printed, and the seconds that it took."""
    pair = pairs[i]
    one = folder / "shared" / target(pair.of, pair.stage.replace("third", "second"))
    other = folder / f"pair-{i}" / target("base", "second")
    if not pair.change:
        other = folder / "shared" / target(f"run-{i}", pair.stage)
    began = time.perf_counter()
    paths = [result_of(path.parent) for path in (one, other)]
    lineages = [Lineage(path.parents[len(pair.stage.split("/")) + 2]) for path in paths]
    found = Comparison(*lineages).causes(*(line.of(path) for line, path in zip(lineages, paths, strict=True)))
    seconds = time.perf_counter() - began
    named = [(one.kind, Path(one.what).name if one.kind == "file" else one.what) for one in found]
    return named, list(map(str, found)), seconds


def measure_diff(folder: Path | None = None) -> None:
    """Train the pairs, and print what is found."""
    server = forkserver.start()
    with tempfile.TemporaryDirectory() as scratch:
        place = folder or Path(scratch)
        try:
            make(place, PAIRS)
        finally:
            if server:
                forkserver.stop(server)
        rows, right, slowest = [], 0, 0.0
        for i, pair in enumerate(PAIRS):
            found, printed, seconds = causes(place, PAIRS, i)
            right += found == [pair.cause]
            slowest = max(slowest, seconds)
            mark = "yes" if found == [pair.cause] else "NO"
            rows.append([pair.name, mark, f"{seconds:.2f}", "\n".join(printed) or "nothing"])
        show(
            f"spider diff: {right} of {len(PAIRS)} named alone, at most {slowest:.2f} s",
            ["what differs", "named alone", "seconds", "printed"],
            rows,
        )


if __name__ == "__main__":
    measure_diff(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
