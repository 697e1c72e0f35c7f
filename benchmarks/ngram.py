"""Measure the n-gram index: building it for larger texts, and looking up candidates in it.

Larger texts are edited copies of the default corpus. In each copy some letters are replaced at random, so the
number of contexts grows with the text. The jobs are the commands of the workflow, one for each part, and each
is measured by itself. Recall is the share of held-out bytes that are among the candidates.

    python benchmarks/ngram.py --results FOLDER [--megabytes 24 500] [--orders 6 22] [--quick] [--json FILE]

FOLDER: results of a run whose model reads an n-gram index (the default run's).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from common import PROGRAMS, parser, report

from spider.config import MixerConfig, load_config
from spider.data.metadata import load_metadata
from spider.data.shards import Shards
from spider.evaluation.mixer import Mixer
from spider.evaluation.text import validation_stream
from spider.model.spider.config import PRESETS
from spider.ngram import store
from spider.ngram.layout import symbols_of
from spider.ngram.lookup import NgramLookup
from spider.results import Results
from spider.tokens import BYTES

#: MB of text in each part of a larger text.
PART = 100
#: Prints the peak memory of a command in kB. It runs in a small process, because a process that a large one
#: starts begins with the large one's peak.
MEASURE = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
#: Share of the bytes of a copy that are replaced, if they are letters.
NOISE = 0.02
#: The rows of the larger texts are packed to so many targets.
SEQ_LEN = 256

Note = Callable[[str, float, str], None]


def command(words: Sequence[str | Path], folder: Path) -> tuple[float, float]:
    """Run a `spider` command; return its seconds and its peak memory in MB."""
    spider = [PROGRAMS / "spider", "--config", "config.yaml", *words]
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, spider)],
        cwd=folder,
        env={**os.environ, "SPIDER_TRACKING": "off"},
        check=True,
        capture_output=True,
        text=True,
    )
    return time.perf_counter() - began, int(done.stdout) / 1024


def edited(documents: pa.Table, seed: int) -> pa.Table:
    """Return a copy of documents with some letters replaced by others."""
    texts = documents["text"].combine_chunks().cast(pa.large_string())
    _, offsets, content = texts.buffers()
    letters = np.frombuffer(content, np.uint8).copy()
    rng = np.random.default_rng(seed)
    at = np.flatnonzero(rng.random(len(letters)) < NOISE)
    at = at[(letters[at] >= 97) & (letters[at] <= 122)]
    letters[at] = rng.integers(97, 123, len(at))
    copy = pa.LargeStringArray.from_buffers(len(texts), offsets, pa.py_buffer(letters), offset=texts.offset)
    names = pa.array([f"{seed}/{i}" for i in range(len(texts))])
    return pa.table({"text": copy, "id": names})


def write_copies(raw: Sequence[Path], megabytes: float, folder: Path) -> list[Path]:
    """Write edited copies of files until they hold so many MB of text; return the new files."""
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
    return files


def build(raw: Sequence[Path], megabytes: float, orders: list[int] | None, folder: Path, note: Note) -> None:
    """Measure the jobs of a text of so many MB."""
    files = write_copies(raw, megabytes, folder)
    counted = {"contexts": orders} if orders else {}
    model = {"preset": "slim", "ngram": {**PRESETS["slim"]["ngram"], **counted}}
    run = {
        "data": "large",
        "model": model,
        "defaults": {"seq_len": SEQ_LEN, "micro_batch": 1},
        "stages": [{"name": "main", "max_steps": 1}],
    }
    source = {"kind": "local", "files": [str(file) for file in files]}
    config = {"datasets": {"large": {"source": source, "ngram": 0.8}}, "runs": {"run": run}}
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML as well
    parts = [f"{i:03d}" for i in range(len(files))]
    shards = folder / "results/shards/large"
    for part in parts:
        parquet = folder / f"results/raw/large/{part}.parquet"
        command(["data", "download", "large", part, "--output", parquet], folder)
        command(["data", "encode", "large", part, parquet], folder)
    command(["data", "index", "large", "--output", shards / "metadata.json"], folder)
    text = sum(split.tokens for split in load_metadata(shards).splits.values())
    title = f"{text / 1e6:.0f} MB"
    if orders:
        title += f", orders {' '.join(map(str, orders))}"

    def note_job(job: str, *measured: tuple[float, float]) -> None:
        note(f"{title}: {job}, seconds", sum(seconds for seconds, _ in measured), ".0f")
        note(f"{title}: {job}, peak MB", max(peak for _, peak in measured), ",.0f")

    note_job("packing", command(["data", "pack", "large", str(SEQ_LEN)], folder))
    counts = [folder / "counts" / part for part in parts]
    note_job(
        f"counting {len(parts)} parts one after the other",
        *(
            command(["data", "count-ngrams", "run", count.name, "--output", count], folder)
            for count in counts
        ),
    )
    runs = sum(file.stat().st_size for file in folder.glob("counts/*/*/*"))
    note(f"{title}: sorted runs, MB", runs / 1e6, ",.0f")
    index = folder / "ngram/index.json"
    merge = ["data", "build-ngrams", "run", *counts, "--output", index, "--full", "--threads", "2"]
    note_job("merging all that is not held out, two threads", command(merge, folder))
    size = sum(file.size for file in store.IndexDescription.read(index).files.values())
    note(f"{title}: index, MB", size / 1e6, ",.0f")


def look_up(results: Results, quick: bool, note: Note) -> None:
    """Measure lookups in the index of the first run that has one."""
    config = load_config(results.root / "config.yaml")
    run = next(name for name, one in config.runs.items() if one.model.ngram)
    spec = config.stage(run, config.runs[run].stages[-1].name)
    block = spec.model.ngram
    shards = results.shards(spec.data)
    folder = results.ngram(spec.data, block.counted, "split")
    files = store.IndexDescription.read(folder / store.MARK).files
    note("index of the run, MB", sum(file.size for file in files.values()) / 1e6, ".0f")
    tokens, vocabulary = (
        validation_stream(shards, 30_000 if quick else 300_000)[0],
        load_metadata(shards).vocabulary,
    )
    lookup = NgramLookup(store.open_index(folder), block, vocabulary)
    lookup.after(tokens, 0, min(len(tokens), 2000))  # compiles
    began = time.process_time()
    found = lookup.after(tokens, 0, len(tokens))
    seconds = time.process_time() - began
    note("lookups along a stream, kB per processor second", len(tokens) / seconds / 1e3, ".0f")
    view = Shards(shards, "train")
    starts = np.random.default_rng(0).permutation(view.tokens // 256)[: 64 if quick else 1024] * 256
    began = time.process_time()
    lookup.windows(view, starts, 256)
    seconds = time.process_time() - began
    note("lookups in windows of 256, kB per processor second", 256 * len(starts) / seconds / 1e3, ".0f")
    counts, symbols, *_ = lookup.layout.views(found[:-1])
    truth = symbols_of(vocabulary)[tokens[1:]]
    hit = (symbols == truth[:, None]) & (np.arange(symbols.shape[1]) < counts)
    text = vocabulary.bytes_of[tokens[1:]] > 0
    mix(tokens, note)
    note("held-out bytes among the candidates", hit[text].any(1).mean(), ".4f")


def mix(tokens: np.ndarray, note: Note) -> None:
    """Measure the online mixer over a uniform distribution."""
    log_p = np.full((len(tokens) - 1, BYTES.size), -np.log(BYTES.size), np.float32)
    targets = tokens[1:].astype(np.int64)
    Mixer(BYTES, MixerConfig().rate).read(targets[:100], log_p[:100])  # compiles
    for name, keeps in ("each document alone", False), ("with what came before", True):
        mixer = Mixer(BYTES, MixerConfig().rate, keeps_text=keeps, keeps_weights=keeps)
        began = time.process_time()
        for at in range(0, len(targets), 3000):
            mixer.read(targets[at : at + 3000], log_p[at : at + 3000])
        seconds = time.process_time() - began
        note(f"mixer, {name}, kB per processor second", len(tokens) / seconds / 1e3, ".0f")


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--results", type=Path, required=True, help="results of a run")
    arguments.add_argument("--megabytes", type=float, nargs="*", default=[24, 500], help="sizes of texts")
    arguments.add_argument(
        "--orders", type=int, nargs="*", help="count only these orders in them (default: as slim)"
    )
    options = arguments.parse_args()
    rows: list[list[str]] = []
    figures: dict[str, Any] = {}

    def note(name: str, value: float, form: str) -> None:
        rows.append([name, format(value, form)])
        figures[name] = value
        print(rows[-1], flush=True)

    results = Results(options.results.resolve())
    look_up(results, options.quick, note)
    raw = sorted(results.root.glob("raw/*/*.parquet"))
    for megabytes in [2] if options.quick else options.megabytes:
        with tempfile.TemporaryDirectory() as scratch:
            build(raw, megabytes, options.orders, Path(scratch), note)
    report("The n-gram index", ["what", "figure"], rows, figures, options, ["numpy", "numba"])


if __name__ == "__main__":
    main()
