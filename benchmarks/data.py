"""Measure the cleaning of a dataset: which duplicates it finds, what it removes wrongly, and what it costs.

    python benchmarks/data.py [--peers | --index] [--documents 1000000] [--folder FOLDER] [--quick]

The workflow cleans the synthetic text of `benchmarks/corpus.py`, whose truth is known. A removal is right if
the document is a copy of the one that was kept, or of its original. It is right as well if the kept document
contains its word 5-grams outside templates up to the threshold, by brute force. Any other removal is false.
The evidence is compared for several numbers of parts and of jobs at a time. Speeds are those of single
commands, in text per processor second beyond those for a part with one document.

With `--peers` nothing is cleaned. Encoding, the loader and the learning of merges stand beside the plainest
code for the same work, on the embedded corpus in one process. Rows are ratios of processor time, medians of
pairs in turn.

With `--index` nothing is cleaned either. Eight parts, 4 GB of shards, are indexed as before, when one thread
hashed all shards each time, and as now: with more threads, after one new part, and again.

FOLDER keeps the text and the results for another look; what is there is not made again.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from common import PROGRAMS, parser, report, workflow
from corpus import KINDS, Corpus, containment, grams, passages, write

from spider.common.files import digest, sha256

THRESHOLD = 0.8
#: Copies with this containment have to be found.
CLEAR = 0.95
#: Words of a match with held-out text.
MATCH = 13
#: Parts, and jobs at a time, of the runs whose evidence is compared.
SPLITS = ((1, 1), (7, 7), (50, 50), (7, 1))
#: Parts that make up the part whose speed is measured.
SPEED_PARTS = 3
QUICK_SPLITS = ((1, 1), (7, 7), (7, 1))
#: Prints the processor seconds of a command.
MEASURE = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime)
"""


class Table:
    """The rows of the report: what was measured, the figure and its goal."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = []
        self.figures: dict[str, Any] = {}

    def add(self, what: str, value: float, form: str, goal: str = "") -> None:
        self.rows.append([what, format(value, form), goal])
        self.figures[what] = np.asarray(value).item()
        print(*self.rows[-1], sep="  ", flush=True)


def dataset(files: str, **cleaning: Any) -> dict[str, Any]:
    """Return a dataset of files, and how it is cleaned."""
    return {"source": {"kind": "local", "files": [files]}, "cleaning": cleaning or None}


def removals(results: Path, name: str) -> pa.Table:
    """Return the evidence of what was removed of a dataset."""
    files = sorted((results / "cleaning" / name / "removed").glob("*.parquet"))
    table = pa.concat_tables([pq.read_table(file) for file in files])
    return table.filter(table["removed"])


# The synthetic text


def places(corpus: Corpus, parts: pa.ChunkedArray, rows: pa.ChunkedArray) -> np.ndarray:
    """Return the place in a corpus of rows of its parts."""
    return corpus.starts[parts.cast(pa.int64()).to_numpy()] + rows.cast(pa.int64()).to_numpy()


def both_places(corpus: Corpus, evidence: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Return the places of the removed and of the kept document of each row of evidence."""
    kept = places(corpus, evidence["kept_part"], evidence["kept_row"])
    return places(corpus, evidence["part"], evidence["row"]), kept


def false_removals(corpus: Corpus, removed: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Return which removals are false, given the places of both documents of each pair."""
    originals = corpus.originals[corpus.numbers]
    false = originals[removed] != originals[kept]
    for i in np.flatnonzero(false):
        copy, first = (grams(corpus.document(int(place)).own) for place in (removed[i], kept[i]))
        false[i] = containment(copy, first) < THRESHOLD
    return false


def score(corpus: Corpus, truth: pa.Table, evidence: pa.Table, table: Table) -> None:
    """Add recall, false removals by kind, and what is left of each source."""
    removed, kept = both_places(corpus, evidence)
    assert not np.isin(kept, removed).any(), "a document was removed because of one that was removed"
    gone = np.zeros(corpus.documents, bool)
    gone[removed] = True
    kinds = truth["kind"].to_numpy(zero_copy_only=False)
    how = truth["how"].to_numpy(zero_copy_only=False)
    shared = truth["containment"].to_numpy(zero_copy_only=False)
    is_copy = np.isin(kinds, ["exact", "edited"])
    table.add("documents", corpus.documents, ",")
    table.add("removed", gone.sum(), ",")
    table.add(f"recall of copies with containment of {CLEAR}", gone[shared >= CLEAR].mean(), ".2%", ">= 99%")
    for one in sorted(set(how[is_copy])):
        chosen = (shared >= CLEAR) & (how == one)
        table.add(f"  {one}: recall of {chosen.sum():,}", gone[chosen].mean(), ".2%")
    chosen = is_copy & (shared >= THRESHOLD) & (shared < CLEAR)
    table.add(
        f"  containment of {THRESHOLD} to {CLEAR}: recall of {chosen.sum():,}", gone[chosen].mean(), ".2%"
    )
    false = false_removals(corpus, removed, kept)
    table.add("false removals, of all removals", false.mean(), ".3%", "<= 1%")
    for kind in KINDS:
        wrong, of_kind = np.count_nonzero(false & (kinds[removed] == kind)), kinds == kind
        right = np.count_nonzero(gone & of_kind) - wrong
        note = f"  {kind}: false removals of {of_kind.sum():,} ({right:,} contained in another)"
        table.add(note, wrong / of_kind.sum(), ".3%", "<= 1%")
    sources = truth["source"].to_numpy()
    left = np.bincount(sources[~gone]) / np.bincount(sources[~is_copy])
    table.figures["left of each source"] = left.tolist()
    table.add(
        "least of a source that is left, of its documents that are not copies", left.min(), ".2%", ">= 99%"
    )


def contamination(truth: pa.Table, corpus: Corpus, evidence: pa.Table, table: Table) -> None:
    """Add how many of the documents with a passage of the held-out text were found, and how many others."""
    evidence = evidence.filter(pc.equal(evidence["reason"], "contaminated"))
    gone = np.zeros(corpus.documents, bool)
    gone[places(corpus, evidence["part"], evidence["row"])] = True
    holds = truth["passage"].is_valid().to_numpy()
    table.add(f"contaminated documents found of {holds.sum():,}", gone[holds].mean(), ".2%", "100%")
    held_out = set().union(*(grams(" ".join(words), MATCH) for words in passages()))
    others = np.flatnonzero(gone & ~holds).tolist()
    false = sum(not held_out & grams(corpus.document(place).text, MATCH) for place in others)
    table.add("documents without such a match that were removed", false, ",", "0")


def configure(datasets: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of datasets; the run that it needs is not trained."""
    run = {"data": next(iter(datasets)), "model": "tiny", "stages": [{"name": "main", "max_steps": 1}]}
    return {"datasets": datasets, "runs": {"none": run}}


def clean(datasets: dict[str, Any], results: Path, jobs: int | None = None) -> None:
    """Clean and encode datasets by the workflow, with so many jobs at a time (default: one for each core)."""
    options = [] if jobs is None else ["--cores", str(jobs)]
    targets = [f"datasets/{name}" for name in datasets]
    seconds = workflow(configure(datasets), results, *targets, options=options)
    print(f"{', '.join(datasets)}: {seconds:.0f} s", flush=True)


def processor_seconds(results: Path, *words: str | Path) -> float:
    """Run a `spider data` command; return its processor seconds."""
    spider = [PROGRAMS / "spider", "--config", results.with_suffix(".json"), "data", *words]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, spider)],
        cwd=results.parent,
        env={**os.environ, "SPIDER_TRACKING": "off"},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return float(done.stdout)


def speeds(folder: Path, table: Table) -> None:
    """Add the speeds of the commands: those of one large part, beyond those of a part with one document."""
    tables = [pq.read_table(file) for file in sorted((folder / "corpus/parts").iterdir())[:SPEED_PARTS]]
    large = pa.concat_tables(tables)
    for name, rows in ("full", large), ("one", large.slice(0, 1)):
        (folder / name).mkdir(exist_ok=True)
        pq.write_table(rows, folder / name / "000.parquet")
    size = pc.sum(pc.binary_length(large["text"])).as_py() / 1e6
    decontaminate = [str(folder / "heldout")]
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "exact": {"exact": True},
        "near": {"near": 0.8},
        "both": {"exact": True, "decontaminate": decontaminate},
    }
    datasets = {}
    for kind, cleaning in kinds.items():
        for name in ("full", "one"):
            datasets[f"{kind}-{name}"] = dataset(f"{folder / name}/000.parquet", **cleaning)
    results = folder / "speeds"
    clean(datasets, results)

    def seconds(kind: str, *steps: str) -> float:
        used = 0.0
        for step in steps:
            for name, sign in ("full", 1), ("one", -1):
                raw = results / f"raw/{kind}-{name}/000.parquet"
                found = results / f"buckets-{kind}-{name}"
                rest = {
                    "buckets": ["000", "--output", found],
                    "pairs": [found],
                    "drop": ["000"],
                    "encode": [raw],
                }
                words = [step, f"{kind}-{name}", "000", *rest.get(step, [])]
                used += sign * min(processor_seconds(results, *words) for _ in range(3))
        return used

    exact = seconds("exact", "signatures", "buckets", "pairs", "drop")
    table.add("exact, MB/s a core", size / exact, ".0f")
    table.add("exact, of the time of encoding", exact / seconds("plain", "encode"), ".1%", "<= 10%")
    both = seconds("both", "signatures", "buckets", "pairs", "contaminated", "drop")
    table.add("exact and decontamination, MB/s a core", size / both, ".0f", ">= 80")
    table.add("near: signatures, MB/s a core", size / seconds("near", "signatures"), ".1f", ">= 20")
    table.add("near: buckets and pairs, MB/s a core", size / seconds("near", "buckets", "pairs"), ".1f")


def same_evidence(folder: Path, documents: int, quick: bool, table: Table) -> None:
    """Add whether the evidence is the same for several numbers of parts and of jobs at a time."""
    found, files = set(), {}
    for parts, jobs in QUICK_SPLITS if quick else SPLITS:
        corpus, text = Corpus(documents, parts=parts), folder / f"corpus-{parts}"
        results = folder / f"results-{parts}-{jobs}"
        if not text.exists():
            write(text, corpus)
        clean({"split": dataset(f"{text}/parts/*.parquet", exact=True, near=0.8)}, results, jobs)
        rows = removals(results, "split")
        false = false_removals(corpus, *both_places(corpus, rows)).mean()
        table.add(f"false removals in {parts} parts, of all removals", false, ".3%", "<= 1%")
        found.add(digest(rows.drop_columns(["part", "row", "kept_part", "kept_row"]).to_pylist()))
        evidence = sorted(results.glob("cleaning/split/removed/*.parquet"))
        files.setdefault(parts, set()).add(digest([sha256(file) for file in evidence]))
    table.add("different removals for different numbers of parts and jobs", len(found), "d", "1")
    table.add("different files of evidence for one number of parts", max(map(len, files.values())), "d", "1")


def synthetic(folder: Path, documents: int, quick: bool, table: Table) -> None:
    """Measure cleaning on the synthetic text."""
    corpus = Corpus(documents)
    if not (folder / "corpus/truth.parquet").exists():
        began = time.perf_counter()
        size = write(folder / "corpus", corpus)
        print(f"{size / 1e6:,.0f} MB of text in {time.perf_counter() - began:.0f} s", flush=True)
        (folder / "heldout").mkdir()
        (folder / "corpus/heldout.jsonl").rename(folder / "heldout/passages.jsonl")
    truth = pq.read_table(folder / "corpus/truth.parquet")
    parts, results = f"{folder}/corpus/parts/*.parquet", folder / "results"
    decontaminate = [str(folder / "heldout")]
    clean(
        {
            "near": dataset(parts, exact=True, near=THRESHOLD),
            # Held-out documents are not compared with protected text.
            "contaminated": dataset(parts, decontaminate=decontaminate) | {"validation": 0},
        },
        results,
    )
    score(corpus, truth, removals(results, "near"), table)
    contamination(truth, corpus, removals(results, "contaminated"), table)
    speeds(folder, table)
    same_evidence(folder, 2000 if quick else 20_000, quick, table)


# Beside plain code


def beside(ours: Callable[[], Any], plain: Callable[[], Any], pairs: int = 5) -> float:
    """Return the processor time of ``ours`` as a multiple of that of ``plain``, the median of pairs."""
    ratios = []
    for _ in range(pairs):
        times = [time.process_time()]
        for run in (ours, plain):
            run()
            times.append(time.process_time())
        ratios.append((times[1] - times[0]) / (times[2] - times[1]))
    return statistics.median(ratios)


def peers(folder: Path, quick: bool, table: Table) -> None:
    """Add the ratios to plain code."""
    import rustbpe
    import torch

    from spider.config import Dataset, TokenizerConfig
    from spider.data.encode import encode_part
    from spider.data.loader import Loader
    from spider.data.shards import Shards, build_metadata
    from spider.data.sources.pydocs import write_pydocs
    from spider.data.tokenizer import learn
    from spider.tokens import BYTES
    from spider.tokens.stored import PATTERN
    from spider.training.passes import inputs_of

    torch.set_num_threads(1)
    small, large, shards = folder / "text.parquet", folder / "large.parquet", folder / "shards"
    write_pydocs(0, 8 if quick else 1, small)
    text = pq.read_table(small, columns=["text", "id"])
    pq.write_table(pa.concat_tables([text] * 7), large, row_group_size=1000)
    spec = Dataset(source={"kind": "local", "files": [str(large)]}, validation=0.005)

    def copy() -> None:
        with (folder / "copy.bin").open("wb") as file:
            for batch in pq.ParquetFile(large).iter_batches(100, columns=["text", "id"], use_threads=False):
                _, ends, data = batch["text"].buffers()
                bounds = np.frombuffer(ends, np.int32, len(batch) + 1)
                file.write(np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]].astype(np.uint16).data)
            os.fsync(file.fileno())

    ratio = beside(lambda: encode_part(large, shards, "000", spec), copy)
    table.add("encode bytes, beside decode, widen, write", ratio, ".2f", "<= 1.2")
    build_metadata(shards, "text", spec, source={}, parts=["000"])
    train, tokens = Shards(shards, "train"), np.memmap(shards / "train/000.bin", np.uint16, mode="r")
    settings, cpu = SimpleNamespace(settings=SimpleNamespace(attend="all")), torch.device("cpu")
    for length in (256, 2048):
        loader, random = Loader(train, seq_len=length, rows=32, seed=0), np.random.default_rng(0)

        def load(loader: Loader = loader) -> None:
            for _ in range(320):
                inputs_of(next(loader), cpu, BYTES.pad, settings)

        def gather(length: int = length, random: np.random.Generator = random) -> None:
            for _ in range(320):
                starts = random.integers(0, len(tokens) - length - 1, 32).tolist()
                torch.from_numpy(np.stack([tokens[at : at + length + 1] for at in starts])).long()

        table.add(f"loader at {length}, beside a memmap, stack, long", beside(load, gather), ".2f", "<= 1")
        loader.close()
    for size in (700,) if quick else (4096, 32768):
        config, output = TokenizerConfig(data="text", vocab_size=size), folder / "tokenizer.json"

        def plain(size: int = size) -> None:
            texts = iter(pq.read_table(small, columns=["text"])["text"].to_pylist())
            rustbpe.Tokenizer().train_from_iterator(texts, size - 16, pattern=PATTERN)

        ratio = beside(lambda c=config, o=output: learn([small], o, "t", c, spec), plain)
        table.add(f"learn {size} ids, beside rustbpe", ratio, ".2f", "<= 1.1")


def indexing(folder: Path, quick: bool, table: Table) -> None:
    """Add the seconds to index a dataset of random text, and how many times faster than before they are."""
    from spider.common.files import read_json, write_json
    from spider.config import Dataset
    from spider.data.encode import encode_part
    from spider.data.shards import build_metadata

    parts = [f"{number:03d}" for number in range(8)]
    spec = Dataset(source={"kind": "mock"}, validation=0)
    letters = np.random.default_rng(0).integers(97, 123, (32, (1 if quick else 256) << 15), np.uint8)
    texts = [letters[number % 32].tobytes().decode() for number in range(32)]
    pq.write_table(pa.table({"text": texts, "id": range(32)}), folder / "text.parquet", row_group_size=1)
    shards = folder / "shards"
    encode_part(folder / "text.parquet", shards, parts[0], spec)
    for part in parts[1:]:
        for file in [path for split in spec.splits for path in (shards / split).glob(f"{parts[0]}.*")]:
            if file.suffix == ".json":
                record = read_json(file)
                named = {"part": part, "file": record["file"].replace(parts[0], part)}
                write_json(file.with_stem(part), record | named)
            else:
                shutil.copyfile(file, file.with_stem(part))
    size = sum(path.stat().st_size for path in shards.rglob("*.bin")) / 1e9
    table.add("GB of shards", size, ".2f")

    def seconds(threads: int, forget: Sequence[str]) -> float:
        for kept in (shards / ".sha256").rglob("*.json"):
            if kept.stem in forget:
                kept.unlink()
        began = time.perf_counter()
        build_metadata(shards, "text", spec, source={}, parts=parts, threads=threads)
        return time.perf_counter() - began

    seconds(1, parts)  # reads the files into the page cache
    before = seconds(1, parts)
    table.add("all hashed, 1 thread: seconds", before, ".2f")
    for threads in (2, 4, 8):
        table.add(f"all hashed, {threads} threads: times faster", before / seconds(threads, parts), ".2f")
    table.add("one new part, 1 thread: times faster", before / seconds(1, parts[-1:]), ".1f", ">= 6")
    table.add("nothing new: times faster", before / seconds(1, []), ".0f", ">= 6")
    table.add("cores", os.cpu_count() or 1, "d")


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--documents", type=int, help="of the synthetic text (default: a million)")
    arguments.add_argument("--peers", action="store_true", help="measure speeds beside plain code")
    arguments.add_argument("--index", action="store_true", help="measure the indexing of a dataset")
    arguments.add_argument("--folder", type=Path, help="keep the text and the results here")
    options = arguments.parse_args()
    documents = options.documents or (20_000 if options.quick else 1_000_000)
    table = Table()
    with tempfile.TemporaryDirectory(prefix="data-", ignore_cleanup_errors=True) as scratch:
        folder = (options.folder or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if options.peers:
            peers(folder, options.quick, table)
        elif options.index:
            indexing(folder, options.quick, table)
        else:
            synthetic(folder, documents, options.quick, table)
    report(
        "Beside plain code" if options.peers else "Indexing" if options.index else "Cleaning",
        ["", "measured", "goal"],
        table.rows,
        table.figures,
        options,
        ["numpy", "numba", "pyarrow"],
    )


if __name__ == "__main__":
    main()
