"""The n-gram index of the default corpus and of larger texts: seconds, bytes, candidates and their speed.

Counting and merging run as in the workflow, a job a part, on the machine's processors. Recall is the share of
held-out bytes that are among the candidates.

The larger texts are copies of the default corpus, each edited: letters are replaced at random, so that
contexts grow with the text. Their jobs are the commands of the workflow, each measured by itself.

    python benchmarks/memory.py --results FOLDER [--megabytes 50 500] [--only-large] [--quick] [--json FILE]

FOLDER: results of a run whose dataset is downloaded and encoded (the default run's).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from common import parser, report, show

from spider.config.memory import MemoryConfig
from spider.data.metadata import load_metadata
from spider.data.shards import Shards
from spider.evaluation.held_out import validation_stream
from spider.memory import store, table
from spider.memory.contexts import name_of
from spider.memory.count import runs_of
from spider.memory.proposer import Proposer
from spider.memory.runs import slices, slices_for
from spider.memory.symbols import symbols_of
from spider.model.spider.config import PRESETS

#: MB of text in each part of a larger text.
PART = 100
#: Prints the peak memory of a command, in kB. A small process starts the command, because one that a large
#: process starts begins with the peak of that.
MEASURE = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
#: Share of the bytes of an edited copy that are replaced, if they are letters.
NOISE = 0.02
#: The rows of the larger texts' dataset are packed to so many targets.
SEQ_LEN = 256


def job(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of some work in a process of its own, and its peak memory in MB."""

    def measured(pipe: Any) -> None:
        began = time.perf_counter()
        work()
        pipe.send((time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))

    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=measured, args=(there,))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit("a job failed")
    answer: tuple[float, float] = here.recv()
    return answer


def command(work: Sequence[str | Path], folder: Path) -> tuple[float, float]:
    """Return the seconds of a `spider` command and its peak memory in MB."""
    words = [str(Path(sys.executable).with_name("spider")), "--config", "config.yaml", *map(str, work)]
    environment = {**os.environ, "SPIDER_TRACKING": "off"}
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *words],
        cwd=folder,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return time.perf_counter() - began, int(done.stdout) / 1024


def edited(table_of_text: pa.Table, seed: int) -> pa.Table:
    """Return a copy of documents in which some letters are replaced by others."""
    texts = table_of_text["text"].combine_chunks().cast(pa.large_string())
    _, offsets, content = texts.buffers()
    letters = np.frombuffer(content, np.uint8).copy()
    rng = np.random.default_rng(seed)
    at = np.flatnonzero(rng.random(len(letters)) < NOISE)
    at = at[(letters[at] >= 97) & (letters[at] <= 122)]
    letters[at] = rng.integers(97, 123, len(at))
    made = pa.LargeStringArray.from_buffers(len(texts), offsets, pa.py_buffer(letters), offset=texts.offset)
    names = pa.array([f"{seed}/{i}" for i in range(len(texts))])
    return pa.table({"text": made, "id": names})


def large(
    raw: Sequence[Path], megabytes: float, orders: list[int], folder: Path, note: Callable[..., None]
) -> None:
    """Measure the jobs of a text of so many MB, which is made of edited copies of these files."""
    files: list[Path] = []
    seed = written = 0
    while written < megabytes * 1e6:
        files.append(folder / f"text-{len(files):03d}.parquet")
        until = min(megabytes * 1e6, written + PART * 1e6)
        with pq.ParquetWriter(files[-1], pa.schema({"text": pa.large_string(), "id": pa.string()})) as file:
            while written < until:
                copy = edited(pq.read_table(raw[seed % len(raw)], columns=["text"]), seed)
                file.write_table(copy)
                written += copy["text"].nbytes
                seed += 1
    counted = {"orders": orders, "words": []} if orders else {}
    model = {"preset": "slim", "memory": {**PRESETS["slim"]["memory"], **counted}}
    run = {"data": "large", "model": model, "stages": [{"name": "main", "max_steps": 1}]}
    run |= {"defaults": {"seq_len": SEQ_LEN, "micro_batch": 1}}
    source = {"kind": "local", "files": [str(file) for file in files]}
    config = {"datasets": {"large": {"source": source, "memory": 0.8}}, "runs": {"run": run}}
    (folder / "config.yaml").write_text(json.dumps(config))  # which is YAML as well
    parts = [f"{i:03d}" for i in range(len(files))]
    shards = folder / "results/shards/large"
    for part in parts:
        parquet = folder / f"results/raw/large/{part}.parquet"
        command(["download", "large", part, "--output", parquet], folder)
        command(["encode", "large", part, parquet], folder)
    command(["index", "large", "--output", shards / "metadata.json"], folder)
    text = sum(split.tokens for split in load_metadata(shards).splits.values())
    what = f"{text / 1e6:.0f} MB"
    if orders:
        what += f", orders {' '.join(map(str, orders))}"

    def noted(job: str, measured: Sequence[tuple[float, float]]) -> None:
        note(f"{what}: {job}, seconds", sum(seconds for seconds, _ in measured), ".0f")
        note(f"{what}: {job}, peak MB", max(peak for _, peak in measured), ",.0f")

    noted("packing", [command(["pack", "large", str(SEQ_LEN)], folder)])
    counts = [folder / "counts" / part for part in parts]
    noted(
        f"counting {len(parts)} parts one after the other",
        [command(["count", "run", one.name, "--output", one], folder) for one in counts],
    )
    note(f"{what}: runs, MB", sum(file.stat().st_size for file in folder.glob("counts/*/*/*")) / 1e6, ",.0f")
    made = folder / "memory/memory.json"
    merge = ["memory", "run", *counts, "--output", made, "--folded", "--threads", "2"]
    noted("merging all that is not held out, two threads", [command(merge, folder)])
    described = store.MemoryDescription.read(made)
    note(f"{what}: memory, MB", sum(file.size for file in described.files.values()) / 1e6, ",.0f")


def grown(counts: list[Path], config: MemoryConfig) -> None:
    """Show how contexts grow from the last part to all: what `spider.memory.cost` extrapolates."""
    rows = []
    for kind in config.contexts:
        measured = []
        for parts in (counts[-1:], counts):
            runs = [run for part in parts for run in runs_of(part / "memory", kind)]
            size = sum(len(np.load(part / "memory/text.npy", mmap_mode="r")) for part in parts)
            pairs = sum(len(keys) for keys, _ in slices(runs, slices_for(table.pairs_in(runs))))
            with tempfile.TemporaryDirectory() as scratch:
                kept, once = table.build(runs, kind, 2, Path(scratch))
            measured.append(np.log([size, kept + once, kept, pairs]))
        bytes_, *exponents = measured[1] - measured[0]
        at = [f"{np.exp(value) / 1e6:.4g}" for value in measured[1]]
        rows.append([name_of(kind), *at, *(f"{value / bytes_:.3f}" for value in exponents)])
    columns = ["kind", "text, MB", "all", "twice", "pairs", "", "", ""]
    show("Contexts and pairs, M, and the exponents of their growth", columns, rows)


def small(shards: Path, folder: Path, quick: bool, note: Callable[..., None]) -> None:
    """Measure the memory of the default corpus, and what is looked up in it."""
    config = MemoryConfig.model_validate(PRESETS["slim"]["memory"])
    metadata = load_metadata(shards)
    parts = [one.part for one in metadata.splits["memory"].shards]
    counts = [folder / part for part in parts]
    count = lambda: [store.count_part(shards, metadata, part, config, folder / part) for part in parts]  # noqa: E731
    build = partial(store.build, counts, metadata, ["memory"], config, folder / "memory", 2)
    count()  # compiles what is not compiled yet
    seconds, peak = job(count)
    note("counting all parts in one process, seconds", seconds, ".1f")
    note("its peak memory, MB", peak, ",.0f")
    seconds, peak = job(build)
    note("merging, two threads, seconds", seconds, ".1f")
    note("its peak memory, MB", peak, ",.0f")
    made = store.MemoryDescription.read(folder / "memory" / store.MARK)
    note("text, MB", made.bytes / 1e6, ".1f")
    note("memory, MB", sum(file.size for file in made.files.values()) / 1e6, ".0f")
    note("contexts, M", sum(table.contexts for table in made.contexts.values()) / 1e6, ".1f")

    grown(counts, config)
    proposer = Proposer(store.open_memory(folder / "memory"), config, metadata.alphabet)
    tokens, _ = validation_stream(shards, 30_000 if quick else 300_000)
    proposer.after(tokens, 0, min(len(tokens), 2000))
    began = time.process_time()
    proposed = proposer.after(tokens, 0, len(tokens))
    note(
        "proposals of a stream, kB a processor second",
        len(tokens) / (time.process_time() - began) / 1e3,
        ".0f",
    )
    view = Shards(shards, "train")
    starts = np.random.default_rng(0).permutation(view.tokens // 256)[: 64 if quick else 1024] * 256
    began = time.process_time()
    proposer.windows(view, starts, 256)
    note(
        "of windows of 256, kB a processor second",
        256 * len(starts) / (time.process_time() - began) / 1e3,
        ".0f",
    )
    there, symbols, *_ = proposer.layout.views(proposed[:-1])
    truth = symbols_of(metadata.alphabet)[tokens[1:]]
    hit = (symbols == truth[:, None]) & (np.arange(symbols.shape[1]) < there)
    text = metadata.alphabet.bytes_of[tokens[1:]] > 0
    note("held-out bytes among the candidates", hit[text].any(1).mean(), ".4f")


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--results", type=Path, required=True)
    options.add_argument("--data", default="pydocs")
    options.add_argument("--megabytes", type=float, nargs="*", default=[50, 500])
    options.add_argument(
        "--orders", type=int, nargs="*", help="count these in the larger texts (else the contexts of slim)"
    )
    options.add_argument("--only-large", action="store_true", help="leave the default corpus itself out")
    asked = options.parse_args()
    rows: list[list[str]] = []
    figures: dict[str, float] = {}

    def note(what: str, value: float, form: str) -> None:
        rows.append([what, format(value, form)])
        figures[what] = value
        print(rows[-1], flush=True)

    if not asked.only_large:
        with tempfile.TemporaryDirectory() as scratch:
            small(asked.results / "shards" / asked.data, Path(scratch), asked.quick, note)
    raw = sorted((asked.results / "raw" / asked.data).glob("*.parquet"))
    for megabytes in [2] if asked.quick else asked.megabytes:
        with tempfile.TemporaryDirectory() as scratch:
            large(raw, megabytes, asked.orders, Path(scratch), note)
    report("A memory", ["what", "figure"], rows, figures, asked, ["numpy", "numba"])


if __name__ == "__main__":
    main()
