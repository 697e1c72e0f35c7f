"""A shrunk model, a small real corpus, and a trainer in another process to be killed."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from spider.common.errors import Preempted
from spider.common.files import digest
from spider.config import StageSpec, TokenizerConfig, load_config
from spider.data.encode import encode_part
from spider.data.packing import pack
from spider.data.shards import build_metadata
from spider.data.tokenizer import learn
from spider.tokens.stored import read_tokens
from spider.training.stage import train
from tests.unit.small_datasets import dataset
from tests.unit.tokens.texts import texts

REPO = Path(__file__).parents[2]

MODEL = {
    "preset": "tiny",
    "hidden": 32,
    "prelude_layers": 1,
    "coda_layers": 1,
    "ffn_hidden": 64,
    "attention": {"heads": 2, "nope_dim": 8, "rope_dim": 8, "v_dim": 16, "kv_lora_rank": 16},
    "boundary": {"hidden": 16},
    "moe": {"experts": 4, "top_k": 2, "expert_hidden": 16, "shared_hidden": 32},
    "engram": {"layers": [0], "head_dim": 2, "table_size": 101},
    "recurrence": {"layers": 1, "loops": 2, "lora_rank": 2},
}
DEFAULTS = {
    "seq_len": 32,
    "micro_batch": 4,
    "lr": 3e-3,
    "warmup_steps": 4,
    "log_every": 3,
    "ckpt_every": 5,
    "max_steps": 20,
}


@pytest.fixture(autouse=True)
def one_thread():
    """Small matrices on a shared machine; and the subprocesses then use as many."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of a few hundred short documents."""
    root = tmp_path_factory.mktemp("data")
    texts = [
        f"Document {i}: " + "the quick brown fox jumps over the lazy dog. " * (1 + i % 5) for i in range(200)
    ]
    pq.write_table(pa.table({"text": texts, "id": [str(i) for i in range(200)]}), root / "000.parquet")
    folder = root / "shards"
    encode_part(
        root / "000.parquet",
        folder,
        "000",
        dataset(validation=0.1),
    )
    source = {"kind": "local", "files": ["000.parquet"]}
    build_metadata(folder, "toy", dataset(validation=0.1), source=source, parts=["000"])
    return folder


@pytest.fixture(scope="session")
def make_spec() -> Callable[..., StageSpec]:
    def make(
        stage: str = "a",
        *,
        optimizer: str | dict[str, Any] = "muon",
        model: dict[str, Any] | None = None,
        **changes: Any,
    ):
        """Stage ``a`` or ``b`` of a run; a change to a run's key or a stage setting goes where it belongs."""
        of_run = {"seed", "precision", "tf32", "compile", "kernels", "evaluation"}
        run_keys = {k: changes.pop(k) for k in of_run & changes.keys()}
        config = load_config(
            {
                "datasets": {"toy": {"source": {"kind": "pydocs"}}},
                "runs": {
                    "r": {
                        "data": "toy",
                        "model": {**MODEL, **(model or {})},
                        "optimizer": {"kind": optimizer} if isinstance(optimizer, str) else optimizer,
                        "precision": "fp32",
                        "defaults": {**DEFAULTS, **changes},
                        "stages": [{"name": "a"}, {"name": "b"}],
                        "evaluation": {"checkpoints": 0},
                        **run_keys,
                    }
                },
            }
        )
        return config.stage("r", stage)

    return make


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Callable[[StageSpec], Path]:
    """Return a function that gives the folder of an undisturbed training of a spec, trained once."""
    known: dict[str, Path] = {}

    def trained(spec: StageSpec) -> Path:
        name = digest(spec.model_dump(mode="json"))
        if name not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            torch.set_num_threads(1)
            train(spec, folder, shards)
            known[name] = folder
        return known[name]

    return trained


@pytest.fixture(scope="session")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations in a tokenizer's 300 ids, packed into rows of 32 that many do not fit into."""
    root, settings = tmp_path_factory.mktemp("talk"), dataset(validation=0.1, format="chat")
    said = texts(400)
    rows = [
        json.dumps([{"role": "user", "content": asked[:80]}, {"role": "assistant", "content": answer}])
        for asked, answer in zip(said[::2], said[1::2], strict=True)
    ]
    for name, column in (("text", said), ("000", rows)):
        table = pa.table({"text": column, "id": [str(i) for i in range(len(column))]})
        pq.write_table(table, root / f"{name}.parquet")
    config = TokenizerConfig(data="text", vocab_size=300)
    learn([root / "text.parquet"], learned := root / "tokenizer.json", "t", config, dataset(validation=0.1))
    encode_part(root / "000.parquet", folder := root / "shards", "000", settings, read_tokens(learned))
    build_metadata(folder, "talk", settings, source={}, parts=["000"], tokenizer=learned)
    pack(folder, 32)
    return folder


@pytest.fixture(scope="session")
def talk_spec() -> StageSpec:
    """A GPT that learns the answers of `talk`, each row's documents apart, and runs fewer layers than it has
    skips for."""
    source = {"source": {"kind": "pydocs"}, "tokenizer": "t", "format": "chat"}
    model = {"preset": "gpt-cpu", "hidden": 32, "heads": 2, "windows": "SL", "short_window": 8}
    model |= {"value_embeddings": "alternate", "skips": True, "vocab_multiple": 64}
    model["recurrence"] = {"layers": [1, 2], "loops": 2}
    packed = {"packing": "best_fit", "attend": "document", "learn": "assistant", "n_loops": 1}
    batch = {"micro_batch": 2, "grad_accum": 4, "max_steps": 12, "ckpt_every": 2, "log_every": 3}
    run = {
        "data": "talk",
        "model": model,
        "optimizer": {"kind": "muon", "muon_beta2": 0.95},
        "precision": "fp32",
        "stages": [{"name": "a", **DEFAULTS, **batch, **packed}],
    }
    tokenizers = {"t": {"data": "talk", "vocab_size": 300}}
    config = {"datasets": {"talk": source}, "tokenizers": tokenizers, "runs": {"r": run}}
    return load_config(config).stage("r", "a")


class TrainerProcess:
    """A trainer in a process of its own, in the words of `subprocess.Popen`.

    It is forked by a process that has imported torch, which takes longer than all that a test trains.
    """

    def __init__(self, folder: Path, *given: Any) -> None:
        self._said = folder.with_name(f"{folder.name}-{uuid4().hex}.log")
        forks = multiprocessing.get_context("forkserver")
        forks.set_forkserver_preload(["spider.training.stage"])
        reading, writing = forks.Pipe(duplex=False)
        self._process = forks.Process(target=_train, args=(writing, self._said, folder, *given), daemon=True)
        self._process.start()
        writing.close()
        self.stdout = os.fdopen(os.dup(reading.fileno()))
        reading.close()
        self.kill, self.terminate = self._process.kill, self._process.terminate
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        assert self.returncode is not None, "it hangs"
        return self.stdout.read(), self._said.read_text()

    def end(self) -> None:
        self.kill()
        self.wait()
        self.stdout.close()
        self._said.unlink(missing_ok=True)


def _train(writing: Connection, said: Path, folder: Path, before: str, spec: StageSpec, data: Path) -> None:
    """Print the number of each step."""
    os.dup2(writing.fileno(), 1)
    with open(said, "w") as file:
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    torch.set_num_threads(1)
    exec(before, {})
    try:
        train(spec, folder, data, on_step=lambda step: print(step, flush=True))
    except Preempted as stop:
        sys.exit(stop.exit_code)
    except ValueError as error:
        sys.exit(f"{type(error).__name__}: {error}")


@pytest.fixture
def start(shards: Path) -> Iterator[Callable[..., TrainerProcess]]:
    """Start a trainer, after the code ``before``; what still runs at the end of the test is killed."""
    started: list[TrainerProcess] = []

    def begin(spec: StageSpec, folder: Path, *, before: str = "", data: Path | None = None) -> TrainerProcess:
        started.append(TrainerProcess(folder, before, spec, data or shards))
        return started[-1]

    yield begin
    for process in started:
        process.end()
