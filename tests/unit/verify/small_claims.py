"""Claims about a model on small datasets of real text, with shards and an evaluation but no training."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from spider.config import TokenizerConfig, load_config
from spider.data.cleaning.evidence import removed_rows
from spider.data.encode import encode_part
from spider.data.ngram.store import build_indexes
from spider.data.shards import build_metadata
from spider.data.tokenizer import learn
from spider.evaluation.text import Text, validation_stream
from spider.tokens import BYTES
from spider.tokens.stored import read_tokens
from spider.verify.claim import Claim
from tests.unit.evaluation.stages import write_stage
from tests.unit.small_datasets import is_validation

#: Share of held-out documents.
VALIDATION = 0.2
MODULES = [
    "argparse", "calendar", "codecs", "csv", "datetime", "difflib", "doctest", "email/message", "fractions",
    "functools", "inspect", "logging/__init__", "mailbox", "optparse", "pdb", "pickletools", "random",
    "socket", "statistics", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "turtle", "typing",
    "zipfile",
]  # fmt: skip


@cache
def documents() -> tuple[str, ...]:
    """Return documentation of Python, without those of few words."""
    found = []
    for name in MODULES:
        path = Path(os.__file__).parent / f"{name}.py"
        path = path if path.exists() else Path(os.__file__).parent / name / "__init__.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (
                doc := ast.get_docstring(node)
            ):
                found += [doc] if len(doc.split()) >= 30 else []
    return tuple(dict.fromkeys(found))


Row = tuple[str, str]
"""Id and text."""


def rows() -> list[Row]:
    return [(f"doc-{number}", text) for number, text in enumerate(documents())]


def is_held_out(row: Row) -> bool:
    return is_validation(row[0].encode(), VALIDATION)


def named(text: str, held_out: bool, name: str) -> Row:
    """Return a document with an id that the rule puts into this split."""
    return next(row for n in range(1000) if is_held_out(row := (f"{name}-{n}", text)) == held_out)


def held_out() -> list[Row]:
    return [row for row in rows() if is_held_out(row)]


def edited(text: str, share: float) -> str:
    """Replace a share of the words."""
    rng = random.Random(0)
    return " ".join(f"x{rng.random()}" if rng.random() < share else word for word in text.split(" "))


def learned(change: Callable[[str], str] = str, count: int | None = None) -> list[Row]:
    """Return documents that the rule puts into the train split: changed copies of held-out ones."""
    return [named(change(text), False, f"copy of {id}") for id, text in held_out()[:count]]


class World:
    """A results folder with encoded datasets and an evaluation of a model that was never trained."""

    def __init__(self, root: Path, datasets: dict[str, Any] | None = None, **run: Any) -> None:
        self.root = root
        data = datasets or {"text": {}}
        blocks = {}
        for name, settings in data.items():
            files = [str(root / f"{name}-{part}.parquet") for part in range(2)]
            source = {} if "like" in settings else {"source": {"kind": "local", "files": files}}
            source |= {} if "like" in settings else {"validation": VALIDATION}
            blocks[name] = source | settings
        tokenizers = {"bpe": {"data": next(iter(data)), "vocab_size": 400}}
        tokenizers = tokenizers if any("tokenizer" in one for one in data.values()) else {}
        block = {"data": next(iter(data)), "model": {"preset": "gpt-cpu"}, "optimizer": {"kind": "muon"}}
        block |= {"defaults": {"lr": 1e-3, "seq_len": 64}, "stages": [{"name": "a", "max_steps": 1}]}
        block |= {"evaluation": {"max_bytes": 60_000}}
        self.written = {"results": str(root / "results"), "datasets": blocks, "runs": {"r": block | run}}
        self.written |= {"tokenizers": tokenizers} if tokenizers else {}

    @property
    def claim(self) -> Claim:
        return Claim(load_config(self.written), "r", "a")

    def raw(self, found: list[Row], name: str = "text", **columns: list[str]) -> None:
        """Write the two raw files of a dataset. The first number of an id decides the file."""
        numbers = [int(re.findall(r"\d+", id)[0]) for id, _ in found]
        for part in range(2):
            half = [i for i, number in enumerate(numbers) if number % 2 == part]
            table = {"id": [found[i][0] for i in half], "text": [found[i][1] for i in half]}
            table |= {column: [values[i] for i in half] for column, values in columns.items()}
            parquet = self.claim.results.raw(name, f"{part:03d}")
            parquet.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.table(table), parquet)
            (self.root / f"{name}-{part}.parquet").write_bytes(parquet.read_bytes())

    def encode(self, name: str = "text") -> None:
        """Make the shards of a dataset from its raw files."""
        claim = self.claim
        config, dataset, results = claim.config, claim.config.dataset(name), claim.results
        raws = {part: results.raw(config.raw(name), part) for part in ("000", "001")}
        tokenizer = results.tokenizer("bpe") if dataset.tokenizer else None
        if tokenizer and not tokenizer.exists():
            settings = TokenizerConfig(data="text", vocab_size=400)
            tokenizer.parent.mkdir(parents=True)
            learn([*raws.values()], tokenizer, "bpe", settings, dataset)
        tokens = read_tokens(tokenizer) if tokenizer else BYTES
        for part, raw in raws.items():
            removed = results.cleaning(config.raw(name), "removed", part)
            given = removed_rows(removed if config.cleaning(name) else None)
            encode_part(raw, results.shards(name), part, dataset, tokens, given)
        build_metadata(results.shards(name), name, dataset, source={}, parts=[*raws], tokenizer=tokenizer)

    def index(self, name: str = "text") -> Path:
        """Build the n-gram indexes, and return the folder of both."""
        config = self.claim.config.run("r").model.ngram
        full = self.claim.results.ngram(name, config.counted)
        build_indexes(self.claim.results.shards(name), config, full.parent / "split", full)
        return full.parent

    def evaluate(self, **changes: Any) -> None:
        """Write the evaluation of the text that the shards have now."""
        claim = self.claim
        folder, settings = claim.results.shards(claim.held_out), claim.spec.evaluation
        ids, digest = validation_stream(folder, settings.max_bytes, BYTES, settings.largest_group)
        text = Text.of(ids, BYTES)
        targets = {
            "byte": len(text),
            "eos": int((ids == BYTES.eos).sum()),
            "bos": int((ids == BYTES.bos).sum()) - 1,
        }
        about = {
            "bytes": len(text),
            "documents": targets["bos"] + 1,
            "targets": targets,
            "data_digest": digest,
        }
        about["text_sha256"] = hashlib.sha256(text.bytes_N.tobytes()).hexdigest()
        shutil.rmtree(claim.results.root / "runs", ignore_errors=True)
        write_stage(claim.results.root / "runs", "r", "a", 0, 2.0, global_step=1, steps=1, **about | changes)

    def make(self, found: list[Row] | None = None, **columns: list[str]) -> World:
        """Write raw files, shards and the evaluation of the only dataset."""
        self.raw(found or rows(), **columns)
        self.encode()
        self.evaluate()
        return self


def conversation(text: str) -> str:
    begin, _, rest = text.partition("\n")
    said = [{"role": "user", "content": begin or "?"}, {"role": "assistant", "content": rest or "!"}]
    return json.dumps(said)


def found_by(check: Callable[..., Any], world: World, quick: bool = False) -> tuple[str, str, list[Any]]:
    """Return what a check says of a claim."""
    finding = check(world.claim, quick)
    return finding.status, finding.reason, finding.details


def passes_by(check: Callable[..., Any], world: World) -> str:
    """Expect that a claim passes a check, quick or whole, and return the reason that the whole one gives."""
    for quick in (True, False):
        status, reason, details = found_by(check, world, quick)
        assert (status, details) == ("passed", []), reason
    return reason
