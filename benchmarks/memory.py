"""A memory of the default corpus: seconds and bytes, what it proposes, how fast, and ten times the text.

Counting and merging run as in the workflow, a job a part, on the machine's processors. Recall is the share of
held-out bytes that are among the candidates. The tenfold text is the corpus with bytes replaced at random, so
that contexts grow with it; peak memory is that of the job's process.

    python benchmarks/memory.py --results FOLDER [--quick] [--json FILE]

FOLDER: results of a run whose dataset is encoded (the default run's), with a share for a memory.
"""

from __future__ import annotations

import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import parser, report, show

from spider.config.memory import MemoryConfig
from spider.data.metadata import DTYPE, Metadata, load_metadata
from spider.data.shards import Shards
from spider.evaluation.held_out import validation_stream
from spider.memory import store, table
from spider.memory.contexts import name_of
from spider.memory.count import runs_of, write_runs
from spider.memory.proposer import Proposer
from spider.memory.symbols import symbols_of
from spider.model.spider.config import PRESETS

#: Share of the tenfold text's bytes that are replaced.
NOISE = 0.02


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


def noisy(shards: Path, metadata: Metadata, part: str, seed: int) -> np.ndarray:
    """A part's memory split as symbols, some of its letters replaced by others."""
    shard = next(one for one in metadata.splits["memory"].shards if one.part == part)
    text = symbols_of(metadata.alphabet)[np.fromfile(shards / shard.file, DTYPE)]
    rng = np.random.default_rng(seed)
    at = np.flatnonzero(rng.random(len(text)) < NOISE)
    at = at[(text[at] >= 97) & (text[at] <= 122)]
    text[at] = rng.integers(97, 123, len(at))
    return text


def grown(counts: list[Path], config: MemoryConfig) -> None:
    """How contexts grow with the text, from the last part to all: what `spider.memory.cost` extrapolates."""
    rows = []
    for kind in config.contexts:
        measured = []
        for parts in (counts[-1:], counts):
            runs = [run for part in parts for run in runs_of(part / "memory", kind)]
            size = sum(len(np.load(part / "memory/text.npy", mmap_mode="r")) for part in parts)
            first, once = table.build(runs, kind, 2, lambda rows: None)
            measured.append(np.log([size, int(first[-1]) + once, int(first[-1])]))
        bytes_, *exponents = measured[1] - measured[0]
        at = [f"{np.exp(value) / 1e6:.4g}" for value in measured[1]]
        rows.append([name_of(kind), *at, *(f"{value / bytes_:.3f}" for value in exponents)])
    show("Contexts, M, and the exponents of their growth", ["kind", "text, MB", "all", "twice", "", ""], rows)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--results", type=Path, required=True)
    options.add_argument("--data", default="pydocs")
    asked = options.parse_args()
    shards, config = (
        asked.results / "shards" / asked.data,
        MemoryConfig.model_validate(PRESETS["slim"]["memory"]),
    )
    metadata, rows, figures = load_metadata(shards), [], {}
    parts = [one.part for one in metadata.splits["memory"].shards]

    def note(what: str, value: float, form: str) -> None:
        rows.append([what, format(value, form)])
        figures[what] = value
        print(rows[-1], flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
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
        tokens, _ = validation_stream(shards, 30_000 if asked.quick else 300_000)
        proposer.after(tokens, 0, min(len(tokens), 2000))
        began = time.process_time()
        proposed = proposer.after(tokens, 0, len(tokens))
        note(
            "proposals of a stream, kB a processor second",
            len(tokens) / (time.process_time() - began) / 1e3,
            ".0f",
        )
        view = Shards(shards, "train")
        starts = np.random.default_rng(0).permutation(view.tokens // 256)[: 64 if asked.quick else 1024] * 256
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

        times = 2 if asked.quick else 10
        tenfold = [folder / "many" / f"{i:03d}" for i in range(times * len(parts))]

        def count_one(i: int) -> None:
            write_runs(
                noisy(shards, metadata, parts[i % len(parts)], i), config.contexts, tenfold[i] / "memory"
            )

        peaks = [job(partial(count_one, i)) for i in range(len(tenfold))]
        note(f"{times} times the text: counting a part, peak MB", max(peak for _, peak in peaks), ",.0f")
        seconds, peak = job(partial(store.build, tenfold, metadata, ["memory"], config, folder / "memory", 2))
        note(f"{times} times the text: merging, seconds", seconds, ".1f")
        note(f"{times} times the text: merging, peak MB", peak, ",.0f")
        made = store.MemoryDescription.read(folder / "memory" / store.MARK)
        note(
            f"{times} times the text: memory, MB", sum(file.size for file in made.files.values()) / 1e6, ".0f"
        )
    report("A memory", ["what", "figure"], rows, figures, asked, ["numpy", "numba"])


if __name__ == "__main__":
    main()
