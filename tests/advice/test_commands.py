"""Advice of commands: each is refused, given again as the message says, and succeeds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from spider.cli import cli
from spider.common.results import write_config
from spider.config import load_config
from spider.config.data import source_class
from tests.unit.small_training import DEFAULTS, MODEL

from .followed import advised, changed, check_said, refused

CONFIG = {
    "datasets": {"toy": {"source": {"kind": "local", "files": ["toy.parquet"]}, "validation": 0.1}},
    "runs": {
        "r": {
            "data": "toy",
            "model": MODEL,
            "optimizer": {"kind": "muon"},
            "precision": "fp32",
            "defaults": DEFAULTS | {"max_steps": 5, "val_every": 0},
            "stages": [{"name": "a"}],
            "evaluation": {"max_bytes": 600, "loops_bytes": 0, "training_bytes": 0, "sample_bytes": 5},
        }
    },
    "tracking": {"enabled": False},
}
SHARDS = Path("results/shards/toy")


def configure(**changes: Any) -> None:
    plain = changed(CONFIG, {path.replace("__", "."): value for path, value in changes.items()})
    Path("config.yaml").write_text(yaml.safe_dump(plain))


def spider(*words: object) -> str:
    """Run a command that has to succeed, and return its output."""
    done = CliRunner().invoke(cli, [*map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def refusal(*words: object) -> str:
    """Return what a command says that must not succeed."""
    done = CliRunner().invoke(cli, [*map(str, words)])
    assert done.exit_code, done.output
    return f"{done.output}{done.exception}"


@pytest.fixture(scope="session")
def made(tmp_path_factory, shards) -> Path:
    """Return a folder with an encoded dataset and a trained stage."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("SPIDER_TRACKING", "off")
        configure()
        write_config(Path("results"), CONFIG)
        shutil.copyfile(shards.parent / "000.parquet", "toy.parquet")
        for step in (("download", "000", "--output"), ("encode", "000")):
            spider("data", step[0], "toy", step[1], *step[2:], "results/raw/toy/000.parquet")
        spider("data", "index", "toy", "--output", SHARDS / "metadata.json")
        spider("train", "r/a", "--threads", 1)
    return folder


@pytest.fixture
def here(made, tmp_path, monkeypatch) -> Path:
    shutil.copytree(made, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_options_of_generation_are_changed(here):
    (here / "prompt").write_text("the ")
    words = ("generate", "r/a", "--bytes", 2)
    said = refusal(*words, "--prompt", "the ", "--prompt-file", "prompt")
    advised(said, "cli/model.py", "give --prompt or --prompt-file, not both")
    spider(*words, "--prompt-file", "prompt")
    spider(*words, "--num-samples", 2)
    advised(refusal(*words, "--prompt", ""), "cli/model.py", "leave it out to begin a document")
    spider(*words)
    advised(refusal("chat", "r/a"), "cli/model.py", "(docs/gpt.md), or use `spider generate`")
    said = refusal(*words, "--prompt", "the " * 40, "--context", 8)
    advised(said, "evaluation/generate.py", "give its end only, or a larger context")
    spider(*words, "--prompt", "the ", "--context", 8)
    spider(*words, "--prompt", "the " * 4, "--context", 32)


def test_a_stage_is_named_and_evaluated(here):
    advised(refusal("evaluate"), "cli/evaluate.py", "RUN/STAGE, or a model of transformers, --model FOLDER")
    advised(refusal("audit", "r/a"), "trust/audit.py", "{}: no such file; run `spider {} {}/{}`")
    spider("evaluate", "r/a", "--threads", 1)
    advised(refusal("report", "draw", "r"), "cli/session.py", "names no stage; write RUN/STAGE")
    spider("report", "draw", "r/a")
    advised(refusal("verify", "results"), "cli/inspect.py", "give the folder of a stage, or RUN/STAGE")
    for name in ("results/runs/r/a", "r/a"):
        spider("audit", name, "--quick", "--only", "distribution")
        spider("verify", name, "--quick", "--only", "score")
    spider("sample", "r/a", "--threads", 1)


def test_the_cleaning_of_a_dataset_is_configured(here):
    words = ("toy", "000")
    advised(refusal("data", "pairs", *words, "found"), "cli/data.py", "set exact: true in it")
    configure(datasets__toy__cleaning={"exact": True})
    spider("data", "signatures", *words)
    spider("data", "buckets", *words, "000", "--output", "found")
    spider("data", "pairs", *words, "found")
    said = refusal("data", "contaminated", *words)
    advised(said, "cli/data.py", "is false; set it, as in docs/data.md")
    configure(datasets__toy__cleaning={"decontaminate": True})
    spider("data", "held-out", *words)
    spider("data", "protect", "toy")
    spider("data", "contaminated", *words)


ADVICE = {
    "cli/data.py": [
        (
            "leaves out all documents ({}); change that block",
            {"cleaning": {"filters": ["bytes > 9999"]}},
            {"cleaning": None},
        ),
        ("raise it (with split_by it is a share of groups)", {"validation": 1e-5}, {"validation": 0.2}),
    ]
}


@pytest.mark.parametrize(("phrase", "broken", "remedy"), ADVICE["cli/data.py"])
def test_documents_are_held_out(here, phrase, broken, remedy):
    def encode(changes: dict[str, Any]) -> tuple[object, ...]:
        configure(**{f"datasets__toy__{key}": value for key, value in changes.items()})
        spider("data", "encode", "toy", "000", "results/raw/toy/000.parquet")
        return "data", "index", "toy", "--output", SHARDS / "metadata.json"

    check_said(refusal(*encode(broken)), phrase)
    spider(*encode(remedy))


def test_a_single_text_is_cut_and_an_empty_one_gets_text(here):
    def index(text: str, **changes: Any) -> tuple[object, ...]:
        Path("book.txt").write_text(text)
        source = {"kind": "local", "files": ["book.txt"]}
        configure(datasets__toy__source=source, **{f"datasets__toy__{key}": changes[key] for key in changes})
        raw = Path("results/raw/toy/000.parquet")
        raw.unlink(missing_ok=True)
        spider("data", "download", "toy", "000", "--output", raw)
        spider("data", "encode", "toy", "000", raw)
        return "data", "index", "toy", "--output", SHARDS / "metadata.json"

    paragraphs = "\n\n".join(f"The text of paragraph {i}." for i in range(300))
    said = refusal(*index(paragraphs))
    advised(said, "cli/data.py", "or set datasets.{}.separator, which cuts a .txt into documents")
    spider(*index(paragraphs, separator="\n\n"))
    said = refusal(*index(""))
    advised(said, "cli/data.py", "datasets.{}.source: holds no document; name files with text")
    spider(*index(paragraphs, separator="\n\n"))


def test_the_configuration_of_a_source_of_ones_own_is_passed(here, monkeypatch):
    monkeypatch.setattr("spider.config.imports._allowed", set())  # another test may have named the source
    with refused("config/data.py", "pass the configuration that names it: spider --config FILE"):
        source_class("tests.sources.toy")
    configure(datasets__toy={"source": {"kind": "tests.sources.toy", "file": "toy.parquet"}})
    load_config(Path("config.yaml"))  # as the command does
    source_class("tests.sources.toy")
