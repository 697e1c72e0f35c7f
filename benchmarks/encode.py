"""Measure encoding: ours, a Python list for each document, `datasets.map`, and the bound.

Text is cut from the sources of the installed Python into documents of FineWeb-Edu's sizes (log-normal, 4.5 kB
on average). The file is a fresh snappy parquet with row groups of 1000, like the hub's files. Every way runs
in one process on one core, reads the same columns and takes turns with the others. MB/s counts raw text, in
medians.

The bound decodes, writes as many bytes as the shards have, and does nothing else. Ours also flushes its files
to the disk (fsync before the rename), so the bound is given with and without. The last way encodes a part in
each of two processes at once. MB per core second counts processor time, which a busy machine disturbs less
than the clock.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import sysconfig
import tempfile
import time
import uuid
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from common import interleaved, parser, report

from spider.config import Dataset
from spider.data.encode import encode_part
from spider.data.metadata import build_metadata
from spider.sources.pydocs import PydocsSource
from spider.tokens import BYTES

DATASET = Dataset(source=PydocsSource(kind="pydocs"))
BOS, EOS = BYTES.bos, BYTES.eos


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    megabytes, repeats = (20, 3) if options.quick else (200, 7)
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="encode-") as scratch:
        folder = Path(scratch)
        rate, core_rate, together = measure(folder, megabytes, repeats, cores)
    rows = [
        [name, f"{value:,.0f}", f"{core_rate[name]:,.0f}" if name in core_rate else ""]
        for name, value in rate.items()
    ]
    figures = {"mb_per_s": rate, "mb_per_core_second": core_rate, "two_processes_to_one": together}
    for name in ("bound", "bound, fsync", "list per document", "datasets.map"):
        ratio, core_ratio = rate["ours"] / rate[name], core_rate["ours"] / core_rate[name]
        rows.append([f"ours / {name}", f"{ratio:.2f}x", f"{core_ratio:.2f}x"])
    if together:
        rows.append(["two processes on two cores / one", f"{together:.2f}x", ""])
    columns = ["way", "MB/s of text", "MB per core second"]
    report("Encoding one part", columns, rows, figures, options, ["pyarrow", "numpy"])


def measure(
    folder: Path, megabytes: int, repeats: int, cores: list[int]
) -> tuple[dict[str, float], dict[str, float], float | None]:
    """Return each way's MB/s, its MB per core second, and the rate of two processes over that of one."""
    whole, small, written = folder / "whole.parquet", folder / "small.parquet", folder / "out/written"
    text_bytes = write_parquet(whole, megabytes * 10**6)
    small_bytes = write_parquet(small, text_bytes // 4)  # for the slow ways
    os.sched_setaffinity(0, cores[:1])
    pa.set_cpu_count(1)
    encode_part(small, folder / "ours", "000", DATASET)
    map_documents(small, folder / "warm")
    records = encode_part(whole, folder / "ours", "000", DATASET)
    output_bytes = sum(2 * record["tokens"] + 8 * record["documents"] for record in records.values())
    seconds, core_seconds = interleaved(
        {
            "ours": lambda: encode_part(whole, folder / "out", "000", DATASET),
            "bound": lambda: bound(whole, written, output_bytes, durable=False),
            "bound, fsync": lambda: bound(whole, written, output_bytes, durable=True),
            "decode only": lambda: bound(whole, written, 0, durable=False),
            "list per document": lambda: list_documents(small, written),
            "datasets.map": lambda: map_documents(small, folder / "out/map"),
        },
        repeats,
        lambda: clear(folder / "out", output_bytes),
    )
    size = dict.fromkeys(seconds, text_bytes)
    size |= dict.fromkeys(("list per document", "datasets.map"), small_bytes)
    rate = {name: size[name] / s / 1e6 for name, s in seconds.items()}
    core_rate = {name: size[name] / s / 1e6 for name, s in core_seconds.items()}
    began = time.perf_counter()
    build_metadata(folder / "ours", "benchmark", DATASET, source={}, parts=["000"])
    rate["index job (SHA-256)"] = text_bytes / (time.perf_counter() - began) / 1e6
    if len(cores) < 2:
        return rate, core_rate, None
    alone, both = two_processes(whole, folder, cores[:2], max(3, repeats // 2))
    rate["ours, two processes"] = 2 * text_bytes / both / 1e6
    return rate, core_rate, 2 * alone / both


def write_parquet(path: Path, size: int) -> int:
    """Write about ``size`` bytes of text in documents; return the exact number."""
    chosen = random.Random(0)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))[:1500]
    source = "".join(file.read_text("utf-8", errors="ignore") for file in files)
    texts, total = [], 0
    while total < size:
        length = max(20, int(chosen.lognormvariate(0, 0.8) * 3300))
        start = chosen.randrange(len(source) - length)
        texts.append(source[start : start + length])
        total += len(texts[-1].encode())
    ids = [f"<urn:uuid:{uuid.UUID(int=chosen.getrandbits(128))}>" for _ in texts]
    dumps = ["CC-MAIN-2020-05"] * len(texts)
    table = pa.table({"text": texts, "id": ids, "dump": dumps})
    pq.write_table(table, path, compression="snappy", row_group_size=1000)
    return total


def clear(output: Path, size: int) -> None:
    """Make an empty folder, and leave ``size`` bytes of memory free in the page cache.

    A virtual machine returns freed memory to its host. The next process that writes pays for getting it back,
    several times the price of the write itself.
    """
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir()
    zeros = bytes(1 << 20)
    with open(output / "ngram", "wb", buffering=0) as sink:
        for _ in range(2 * size >> 20):
            sink.write(zeros)
    (output / "ngram").unlink()


def bound(parquet: Path, output: Path, output_bytes: int, durable: bool) -> None:
    """Decode both columns and write ``output_bytes`` in pieces that stay in the cache."""
    with pq.ParquetFile(parquet) as file:
        for _ in file.iter_batches(1000, columns=["text", "id"], use_threads=False):
            pass
    piece = np.zeros(1 << 18, np.uint16).data.cast("B")
    with open(output, "wb", buffering=0) as sink:
        for start in range(0, output_bytes, len(piece)):
            sink.write(piece[: output_bytes - start])
        if durable:
            os.fsync(sink.fileno())


def list_documents(parquet: Path, output: Path) -> None:
    """Make a Python list of ints for every document, as the original does."""
    with pq.ParquetFile(parquet) as file, open(output, "wb") as sink:
        for batch in file.iter_batches(1000, columns=["text"], use_threads=False):
            for text in batch.column(0).to_pylist():
                np.array([BOS, *text.encode("utf-8"), EOS], dtype=np.uint16).tofile(sink)


def map_documents(parquet: Path, folder: Path) -> None:
    """Make the same list in the function of `datasets.map`, then write its column to a file."""
    import datasets

    datasets.disable_progress_bars()
    features = datasets.Features({"tokens": datasets.List(datasets.Value("uint16"))})
    rows = datasets.Dataset.from_parquet(str(parquet), columns=["text"], cache_dir=str(folder / "cache"))
    encoded = rows.map(
        lambda row: {"tokens": [BOS, *row["text"].encode("utf-8"), EOS]},
        remove_columns=["text"],
        features=features,
        load_from_cache_file=False,
        cache_file_name=str(folder / "map.arrow"),
    )
    with open(folder / "map.bin", "wb") as sink:
        for chunk in encoded.data.column("tokens").chunks:
            chunk.flatten().to_numpy().tofile(sink)


def _worker(
    core: int, parquet: Path, output: Path, start: multiprocessing.Barrier, done: multiprocessing.Queue
) -> None:
    os.sched_setaffinity(0, [core])
    pa.set_cpu_count(1)
    encode_part(parquet, output, "000", DATASET)
    start.wait()
    began = time.perf_counter()
    encode_part(parquet, output, "000", DATASET)
    done.put(time.perf_counter() - began)


def two_processes(parquet: Path, folder: Path, cores: list[int], repeats: int) -> tuple[float, float]:
    """Return the median seconds of one process alone, and of the slower of two at once, in turn."""
    spawn = multiprocessing.get_context("spawn")

    def run(used: list[int]) -> float:
        start, done = spawn.Barrier(len(used)), spawn.Queue()
        workers = [
            spawn.Process(target=_worker, args=(core, parquet, folder / f"core{core}", start, done))
            for core in used
        ]
        for worker in workers:
            worker.start()
        seconds = max(done.get(timeout=600) for _ in workers)
        for worker in workers:
            worker.join()
        return seconds

    pairs = [(run(cores[:1]), run(cores)) for _ in range(repeats)]
    alone, together = (float(np.median(column)) for column in zip(*pairs, strict=True))
    return alone, together


if __name__ == "__main__":
    main()
