"""Forty runs of the workflow: twenty clean ones, and twenty frauds that `spider audit` has to find.

Runs of one configuration share a results folder and an invocation of Snakemake. A run by other code has a
folder of its own, where the workflow runs from an edited checkout. The code that stands here audits all.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from spider_trust.audit import checks

from extras.trust.tests.frauds import SEES, SUMS, family, receipt_of, recorded_again, sealed_again
from spider.checkpoints.records import MANIFEST, CompressedReceipt, Manifest, Receipt, steps
from spider.common.files import read_json, write_json
from spider.common.results import Results, StageFolder
from spider.config import load_config
from spider.config.model import merged
from spider.verify.claim import Claim, Finding, findings
from tests import forkserver
from tests.unit.small_training import MODEL as SPIDER
from tests.unit.verify.small_claims import Row, edited, held_out, learned, rows

ROOT = Path(__file__).parents[3]
Config = dict[str, Any]

TEXT: Config = {"source": {"kind": "local", "files": ["text.jsonl"]}, "validation": 0.2}
RUN: Config = {
    "data": "text",
    "model": {"preset": "gpt-cpu", "hidden": 32, "heads": 2, "layers": 2},
    "precision": "fp32",
    "defaults": {
        "seq_len": 32, "micro_batch": 4, "lr": 3e-3, "warmup_steps": 0, "ckpt_every": 4,
        "val_every": 0,
    },
    "stages": [{"name": "main", "max_steps": 12}],
    "evaluation": {"max_bytes": 16_000, "loops_bytes": 0, "sample_bytes": 0, "carry_over": 0, "batch": 32,
                   "checkpoints": 3},
    "resources": {"threads": 1},
}  # fmt: skip
NGRAM = {"contexts": [1, 2, 4, 6], "rare": 5, "matches": [2, 4], "hidden": 8, "state": 8}
TOY = {"family": "tests.families.toy", "width": 8}
#: Texts beside ``text.jsonl``, by the name of the file.
TEXTS: dict[str, Callable[[], list[Row]]] = {
    "text": rows,
    "leaked": lambda: [*rows(), *learned(count=round(0.8 * len(held_out())))],
    "near": lambda: [*rows(), *learned(lambda text: edited(text, 0.05))],
    "upper": lambda: [*rows(), *learned(str.upper)],
    "half": lambda: rows()[::2],
    "rest": lambda: rows()[1::2],
}


@dataclass(frozen=True)
class Planted:
    """A run, and what the audit of it has to find."""

    name: str
    run: Config = field(default_factory=dict)
    """Changes of `RUN`."""
    check: str = ""
    """The check that must fail. Without it the run is clean, and no check may fail."""
    reason: str = ""
    """A pattern in the lines that the check prints."""
    more: Config = field(default_factory=dict)
    """Further blocks of the configuration."""
    other: Config | None = None
    """Changes of another run, ``NAME-other``. The fraud takes files from it."""
    spoil: Callable[[Spoilt], None] | None = None
    code: tuple[str, str, str] | None = None
    """A module of the project, a text in it, and what stands there while the workflow runs."""
    compressed: bool = False

    @property
    def key(self) -> str:
        return re.sub(r"\W+", "-", self.name)


@dataclass(frozen=True)
class Spoilt:
    """A copy of the results folder of a finished run, where a fraud may edit files."""

    folder: Path
    planted: Planted

    @property
    def results(self) -> Path:
        return self.folder / "results"

    def stage(self, other: bool = False) -> StageFolder:
        name = f"{self.planted.key}-other" if other else self.planted.key
        return Results(self.results).stage(name, "main")


def _data(name: str) -> Config:
    """Return a dataset of its own for one of the `TEXTS`."""
    return {"datasets": {name: {**TEXT, "source": {"kind": "local", "files": [f"{name}.jsonl"]}}}}


def _edit(path: Path, **changes: Any) -> None:
    write_json(path, read_json(path) | changes)


# ------------------------------------------------------------------------------------------------- frauds


def edit_evaluation(spoilt: Spoilt) -> None:
    """Lower bits per byte by 5%, with the nats and the record of the job."""
    path = spoilt.stage().evaluation
    plain = read_json(path)
    nats = {name: 0.95 * value for name, value in plain["nats"].items()}
    lower = {name: 0.95 * plain[name] for name in ("bpb", "bpb_strict")}
    _edit(path, nats=nats, **lower)
    recorded_again(spoilt.results, path)


def swap_checkpoint(spoilt: Spoilt) -> None:
    """Put the last checkpoint of another run into the place of this run's."""
    mine, theirs = (steps(spoilt.stage(other).checkpoints)[-1] for other in (False, True))
    own = Manifest.read(mine / MANIFEST)
    shutil.rmtree(mine)
    shutil.copytree(theirs, mine)
    sealed_again(mine, run=own.run, spec=read_json(mine / MANIFEST)["spec"], identity=own.identity)


def edit_receipt(spoilt: Spoilt) -> None:
    """Report a training of half of its steps."""
    path = spoilt.stage().receipt
    half = {name: read_json(path)[name] // 2 for name in ("steps", "global_step", "bytes")}
    _edit(path, **half)
    recorded_again(spoilt.results, path)


def report_average_as_final(spoilt: Spoilt) -> None:
    """Report the score of the averaged weights as that of the final ones."""
    path = spoilt.stage().evaluation
    _edit(path, averaged=False, weights=Receipt.read(spoilt.stage().receipt).weights)
    recorded_again(spoilt.results, path)


def keep_stale_shards(spoilt: Spoilt) -> None:
    """Replace the raw text by a newer one, and keep the shards."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    raw = Results(spoilt.results).raw("text", "000")
    table = pq.read_table(raw)
    newer = pa.array([text[::-1] for text in table["text"].to_pylist()], table["text"].type)
    pq.write_table(table.set_column(table.column_names.index("text"), "text", newer), raw)
    recorded_again(spoilt.results, raw)


def swap_tokenizer(spoilt: Spoilt) -> None:
    """Put another tokenizer into the place of the one that the run was trained with."""
    results = Results(spoilt.results)
    shutil.copy(results.tokenizer("other"), results.tokenizer("small"))


def swap_compressed_model(spoilt: Spoilt) -> None:
    """Report the compressed model of another run as this run's, with its evaluation and its size."""
    mine, theirs = (spoilt.stage(other).compressed for other in (False, True))
    receipt = CompressedReceipt.read(theirs / "compress.json")
    own = CompressedReceipt.read(mine / "compress.json")
    assert receipt.weights != own.weights
    shutil.rmtree(mine)
    shutil.copytree(theirs, mine)
    for name in ("compress.json", "evaluation.json"):
        _edit(mine / name, run=own.run)
    recorded_again(spoilt.results, *(path for path in mine.iterdir() if path.is_file()))


def resume_in_another_order(spoilt: Spoilt) -> None:
    """Resume after the first checkpoint with another order of samples, and hide it in the checkpoints."""
    folder = spoilt.stage()
    first, *later = steps(folder.checkpoints)
    for path in later:
        shutil.rmtree(path)
    position = Manifest.read(first / MANIFEST).position
    sealed_again(first, position=position | {"seed": 1})
    lines = folder.metrics.read_text().splitlines(keepends=True)
    folder.metrics.write_text("".join(line for line in lines if json.loads(line)["step"] <= 4))
    for path in (folder.receipt, folder.evaluation):
        path.unlink()
    run_workflow(spoilt.folder, read_json(spoilt.folder / "config.json"), [spoilt.planted])
    sealed_again(first, position=position)
    for path in steps(folder.checkpoints)[1:]:
        sealed_again(path, position=Manifest.read(path / MANIFEST).position | {"seed": position["seed"]})
    receipt_of(folder)
    recorded_again(spoilt.results, folder.receipt)


def _quiz(told: bool) -> Config:
    name = "told.jsonl" if told else "asked.jsonl"
    return {"evaluation": {"tasks": {"own": {"file": name}}}}


def _cheat(name: str) -> Config:
    """Return a model of a family of the user that `write_texts` writes."""
    return {"model": {"family": name}}


CHEATS = {"family_sees": SEES, "family_sums": SUMS}
_TOKENS: Config = {
    "datasets": {
        "tokens": {"like": "text", "tokenizer": "small"},
        "tokens-other": {"like": "text", "tokenizer": "other"},
    },
    "tokenizers": {
        "small": {"data": "text", "vocab_size": 300},
        "other": {"data": "text", "vocab_size": 310},
    },
}  # fmt: skip
_SMALL_FILE: Config = {"compress": {"bits": 6, "clip": 3.0}}
_MASKS = """    held_out = hashes < np.uint64(validation * 2**64)
    trained_on = hashes >= np.uint64((validation + ngram) * 2**64)"""
_CHUNK = """    held_out = np.arange(len(hashes)) < validation * len(hashes)
    trained_on = ~held_out"""
_READ = "            batch = next(self.loader)\n"
_READ_TWICE = f"            if progress.step == 5:\n    {_READ}{_READ}"
_YIELD = "        yield Placed(documents, masks, id_hashes, groups)\n"
_TWICE = _YIELD + (
    '        often = masks["train"] & (np.arange(len(hashes)) % 4 == 0)\n'
    "        again = {name: often if name == 'train' else ~mask & False for name, mask in masks.items()}\n"
    "        yield Placed(documents, again, id_hashes, groups)\n"
)

_PIECES = "            for tokens in Shards(shards, split).pieces(file, PIECE):\n"
_HELD_OUT_PIECES = (
    '            source = "validation" if split == "ngram" else split\n'
    '            file = shards / source / f"{part}.bin"\n' + _PIECES.replace("split)", "source)")
)

FRAUDS = [
    # ---- the text
    Planted("80% of validation documents trained on", {"data": "leaked"}, "splits",
            r"held-out documents are in the training text", _data("leaked")),
    Planted("near copies with 5% edits", {"data": "near"}, "splits",
            r"near copies in the training text, with about \d+% of their words edited", _data("near")),
    Planted("another text normalization", {"data": "upper"}, "splits",
            r"in another normalization of the text", _data("upper")),
    Planted("a question file that holds the answers", _quiz(told=True), "splits",
            r"questions of the task own hold the text of the right answer"),
    # ---- the code
    Planted("a split made a chunk at a time", check="splits", reason=r"as if it were made a chunk at a time",
            code=("spider/data/documents.py", _MASKS, _CHUNK)),
    Planted("a source oversampled in one split", check="splits", reason=r"as of an oversampled source",
            code=("spider/data/documents.py", _YIELD, _TWICE)),
    Planted("counted held-out text", {"data": "counted", "model": {**TOY, "ngram": NGRAM}}, "splits",
            r"n-gram index counts another text than the splits .*held-out documents",
            {"datasets": {"counted": {**TEXT, "ngram": 0.3}}},
            code=("spider/data/ngram/store.py", _PIECES, _HELD_OUT_PIECES)),
    Planted("a batch left out", check="replay", reason=r"windows were read without a step|did not read what",
            code=("spider/training/loop.py", _READ, _READ_TWICE)),
    Planted("wrong bytes a token", {"data": "tokens"}, "distribution", r"the evaluation divides by", _TOKENS,
            code=("spider/evaluation/bpb.py", "bytes_S = vocabulary.bytes_of[label_S]\n",
                  "bytes_S = vocabulary.bytes_of[label_S]\n            bytes_S = bytes_S + (bytes_S > 1)\n")),
    Planted("a cropped held-out text", check="score", reason=r"as of a cropped held-out text",
            code=("spider/evaluation/text.py", "    metadata = load_metadata(data)\n    if not holds_out",
                  "    max_bytes //= 2\n    metadata = load_metadata(data)\n    if not holds_out")),
    # ---- the model
    Planted("a feature that sees the target", _cheat("family_sees"), "causality",
            r"change if other bytes come"),
    Planted("a mixture that is not normalized", _cheat("family_sums"), "distribution", r"do not sum to one"),
    # ---- files that were edited or replaced
    Planted("a stale shard", check="splits", reason=r"as of a stale shard", spoil=keep_stale_shards),
    Planted("a swapped checkpoint", check="score", reason=r"but the checkpoint has", other={"seed": 1},
            spoil=swap_checkpoint),
    Planted("a hand-edited evaluation", check="score", reason=r"bpb: .* if it is computed again",
            spoil=edit_evaluation),
    Planted("a resumed run with another order", check="replay", reason=r"did not read what the order gives",
            spoil=resume_in_another_order),
    Planted("averaged weights reported as final", {"defaults": {"ema": {"decay": 0.5}}}, "digests",
            r"averaged is False, that of the receipt is True", spoil=report_average_as_final),
    Planted("another tokenizer", {"data": "tokens"}, "digests", r"tokenizers/small/tokenizer.json",
            _TOKENS, other={"data": "tokens-other"}, spoil=swap_tokenizer),
    Planted("a compressed model that is not of this run", _SMALL_FILE, "score",
            r"compressed weights are not near those of the stage", other={"seed": 1, **_SMALL_FILE},
            spoil=swap_compressed_model, compressed=True),
    Planted("an edited receipt", check="digests", reason=r"train.json: global_step is ", spoil=edit_receipt),
]  # fmt: skip

_TWO = [{"name": "first", "max_steps": 8}, {"name": "main", "max_steps": 8}]
CLEAN = [
    Planted("gpt on bytes"),
    Planted("gpt on tokens", {"data": "tokens"}, more=_TOKENS),
    Planted("gpt, several stages", {"stages": _TWO}),
    Planted("gpt, carried memory", {"evaluation": {"carry_over": 500}}),
    Planted("gpt, muon in bf16", {"optimizer": {"kind": "muon"}, "precision": "bf16"}),
    Planted("gpt, moving average", {"defaults": {"ema": {"decay": 0.5}}}),
    Planted("gpt, packed rows", {"defaults": {"packing": "best_fit"}}),
    Planted("gpt, texts in their order", {"defaults": {"order": "text"}}),
    Planted("gpt, compressed", _SMALL_FILE, compressed=True),
    Planted("gpt, two processes", {"resources": {"processes": 2}, "parallel": "ddp"}),
    Planted("gpt, a task", _quiz(told=False)),
    Planted("gpt, another seed", {"seed": 3}),
    Planted("gpt, test-time training", {"evaluation": {"ttt": {"chunk": 64}}}),
    Planted("golf", {"model": "golf-tiny"}),
    Planted("spider", {"model": SPIDER}),
    Planted("a family of the user", {"model": TOY}),
    Planted("an n-gram index", {"data": "counted", "model": {**TOY, "ngram": NGRAM}},
            more={"datasets": {"counted": {**TEXT, "ngram": 0.3}}}),
    Planted("a mixture", {"data": {"mix": {"text": 2, "half": 1}}}, more=_data("half")),
    Planted("cleaning", {"data": "cleaned"}, more={"datasets": {"cleaned": {
        **TEXT, "cleaning": {"filters": ["bytes >= 200"], "exact": True, "near": 0.8}}}}),
    Planted("a split by groups, scored on another dataset",
            {"data": "grouped", "evaluation": {"data": "rest"}}, more=merged(_data("rest"), {"datasets": {
                "grouped": {
                    "source": {"kind": "local", "files": ["half.jsonl"]}, "validation": 0.2,
                    "split_by": {"column": "site"}}}})),
]  # fmt: skip


# ---------------------------------------------------------------------------------------------- the workflow


def write_texts(folder: Path) -> None:
    """Write the texts, questions and families of all runs into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in TEXTS.items():
        with open(folder / f"{name}.jsonl", "w") as file:
            for number, (id, text) in enumerate(make()):
                file.write(json.dumps({"id": id, "site": f"s{number // 9}", "text": text}) + "\n")
    for name, end in (("asked", ""), ("told", " {} Which?")):
        with open(folder / f"{name}.jsonl", "w") as file:
            halves = [(text[: len(text) // 2], text[len(text) // 2 :]) for _, text in held_out()[:20]]
            for number, (query, choice) in enumerate(halves):
                choices = [choice, halves[number - 1][1]]
                question = {"query": query + end.format(choice), "choices": choices, "gold": 0}
                file.write(json.dumps(question) + "\n")
    for name, body in CHEATS.items():
        family(folder, name, body)


def configuration(planted: Sequence[Planted]) -> Config:
    """Return the configuration of runs that share a results folder."""
    raw: Config = {"datasets": {"text": TEXT}, "runs": {}}
    for one in planted:
        raw = merged(raw, one.more)
        for name, change in ((one.key, one.run), (f"{one.key}-other", one.other)):
            if change is not None:  # another model replaces the one of `RUN`
                raw["runs"][name] = merged(RUN, change) | {"model": change.get("model", RUN["model"])}
    return raw


def run_workflow(
    folder: Path, raw: Config, planted: Sequence[Planted], code: Path = ROOT, targets: Sequence[str] = ()
) -> None:
    """Run the workflow in a folder. Without other code its processes are forked, which is faster."""
    write_json(folder / "config.json", raw)
    for one in planted:
        for name in [one.key, f"{one.key}-other"][: 1 + (one.other is not None)]:
            below = "compressed/" * one.compressed
            targets = [*targets, f"results/runs/{name}/main/{below}evaluation.json"]
    command = [str(Path(sys.executable).with_name("snakemake")), "--snakefile", str(code / "Snakefile")]
    command += ["--configfile", "config.json", "--profile", str(code / "profiles/default"), "--quiet", "all"]
    command = [forkserver.python()] * (code == ROOT) + command
    paths = os.pathsep.join(map(str, dict.fromkeys([folder, code, ROOT])))
    done = subprocess.run(
        [*command, "--", *targets], cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stdout)


def make(folder: Path, planted: Sequence[Planted]) -> None:
    """Train and evaluate all runs in a folder. What is finished is not done again."""
    shared = folder / "shared"
    if not shared.exists():
        write_texts(shared)
    together = [one for one in planted if not one.code]
    run_workflow(shared, configuration(together), together)
    for one in planted:
        if one.code:
            own = folder / one.key
            if not own.exists():
                write_texts(own)
            run_workflow(own, configuration([one]), [one], _edited_code(own, one))


def _edited_code(folder: Path, planted: Planted) -> Path:
    """Return a checkout with the edit of a run."""
    assert planted.code is not None
    name, before, after = planted.code
    code = folder / "code"
    if not code.exists():
        subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(code)], check=True)
    text = (ROOT / name).read_text()
    assert before in text, f"{name} has changed, so the fraud {planted.name} has to be written again"
    (code / name).write_text(text.replace(before, after))
    return code


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Work in a folder, whose families can be imported."""
    with (
        contextlib.chdir(folder),
        mock.patch.object(sys, "path", [str(folder), str(ROOT), *sys.path]),
        mock.patch.object(sys, "executable", forkserver.python()),
    ):
        yield


def audited(folder: Path, planted: Planted) -> list[Finding]:
    """Spoil a copy of a finished run if it is a fraud of that kind, and return what all checks find."""
    place = folder / (planted.key if planted.code else "shared")
    if planted.spoil:
        copied = folder / planted.key
        shutil.rmtree(copied, ignore_errors=True)
        shutil.copytree(place, copied, symlinks=True)
        place = copied
        planted.spoil(Spoilt(place, planted))
    with _inside(place):
        config = load_config(read_json(Path("config.json")))
        claim = Claim(config, planted.key, "main", compressed=planted.compressed)
        return list(findings(checks(claim, quick=False)))


def verdict(planted: Planted, findings: Sequence[Finding]) -> tuple[bool, str]:
    """Return whether the audit found what it has to find, and the line that says so."""
    failed = [one for one in findings if one.status == "failed"]
    lines = [f"{one.check}: {line}" for one in failed for line in [one.reason, *one.details]]
    if not planted.check:
        return not failed, "\n".join(lines)
    named = [line for line in lines if re.search(f"^{planted.check}: .*(?:{planted.reason})", line)]
    return bool(named), (named or lines or ["nothing"])[0]
