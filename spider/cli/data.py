"""`spider data`: from raw text to shards and n-gram indexes, in the order of the workflow."""

from __future__ import annotations

import json
import os
from collections import Counter
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import yaml

from spider.cli.session import COUNT, FILE, JSON, THREADS, Group, Session, command, log
from spider.common.files import read_json, sha256, write_json
from spider.common.results import root_of
from spider.config import Config
from spider.config.data import SHORTEST, Cleaning
from spider.config.model import NgramConfig

if TYPE_CHECKING:
    from spider.data.cleaning.buckets import Part


@click.group(cls=Group)
def data() -> None:
    """Datasets: download, clean, encode, index, pack, verify; tokenizers and n-gram indexes."""


@click.command()
@click.argument("repo")
@click.argument("patterns", nargs=-1, required=True, metavar="GLOB...")
@click.option("--revision", default="main", show_default=True, help="Commit, branch or tag.")
def files(repo: str, patterns: tuple[str, ...], revision: str) -> None:
    """Print the source of a dataset with the files of REPO on the hub that match globs, at their commit."""
    from spider.data.hub import matching

    commit, names = matching(repo, revision, patterns)
    source = {"kind": "hub", "repo": repo, "revision": commit, "files": names}
    click.echo(yaml.safe_dump({"source": source}, sort_keys=False), nl=False)


@command("dataset", "part")
@click.option("--output", type=FILE, required=True, help="Parquet file to write.")
def download(session: Session, dataset: str, part: str, output: Path) -> None:
    """Download one part of a dataset as parquet."""
    spec, parts = session.config.dataset(dataset), session.config.parts(dataset)
    if part not in parts:
        raise ValueError(f"datasets.{dataset}: no part {part!r}; there are {len(parts)}, from 000")
    spec.source.fetch(part, output, spec)
    size = output.stat().st_size
    origin = {"part": part, "name": parts[part], "bytes": size, "sha256": sha256(output)}
    write_json(output.with_suffix(".json"), origin)  # metadata.json will contain it
    log.info("%s: %.1f MB from %s", output, size / 1e6, parts[part])


@command("path")
def fetch(session: Session, path: str) -> None:
    """Download the file that the configuration names at PATH, or compare it with its hash if it is there."""
    from spider.data.hub import at, download_file

    address, file = session.config.download(path), Path(path)
    if address is None:
        places = ", ".join(session.config.downloads) or "none"
        raise ValueError(f"{path}: comes from none of downloads ({places}); give a path of one of them")
    download_file(at(address), file)
    record = session.results.root / "downloads" / f"{path}.json"
    write_json(record, {"name": address, "bytes": file.stat().st_size, "sha256": sha256(file)})


@command("tokenizer")
@click.argument("parquets", nargs=-1, required=True, type=FILE)
@click.option("--output", type=FILE, required=True, help="tokenizer.json to write.")
@THREADS
def tokenizer(
    session: Session, tokenizer: str, parquets: tuple[Path, ...], output: Path, threads: int | None
) -> None:
    """Learn a tokenizer from the parquet files of its dataset."""
    if threads:
        os.environ["RAYON_NUM_THREADS"] = str(threads)  # read by rustbpe
    from spider.data.cleaning.evidence import removed_rows
    from spider.data.tokenizer import learn

    config = session.config.tokenizer(tokenizer)
    dataset = session.config.dataset(config.data)
    removed = [_removed(session, config.data, parquet.stem) for parquet in parquets]
    learned = learn(parquets, output, tokenizer, config, dataset, map(removed_rows, removed))
    log.info("%s: %s ids, %s of them merges", output, f"{learned.size:,}", f"{len(learned.merges):,}")


def _removed(session: Session, dataset: str, part: str) -> Path | None:
    """Return the evidence of what cleaning removed of a part; None if it compares no documents."""
    compares = session.config.cleaning(dataset)
    return session.results.cleaning(session.config.raw(dataset), "removed", part) if compares else None


# --------------------------------------------------------------------------------------------------- cleaning


def _cleaning(session: Session, dataset: str) -> Cleaning:
    """Return how the documents of a dataset are compared. Raise `ValueError` if they are not."""
    cleaning = session.config.cleaning(dataset)
    if cleaning is None:
        raise ValueError(f"datasets.{dataset}.cleaning: compares no documents; set exact: true in it")
    return cleaning


def _file(session: Session, dataset: str, step: str, part: str) -> Path:
    """Return a file of the cleaning of a part. Datasets with the same raw text share it."""
    return session.results.cleaning(session.config.raw(dataset), step, part)


def _raw(session: Session, dataset: str, part: str) -> Path:
    return session.results.raw(session.config.raw(dataset), part)


@command("dataset", "part")
def signatures(session: Session, dataset: str, part: str) -> None:
    """Hash the text of each document of a part that the filters keep."""
    from spider.data.cleaning.signatures import write_signatures

    spec = session.config.dataset(dataset)
    spec.source.item(part)
    output = _file(session, dataset, "signatures", part)
    near = session.config.near(dataset)
    counts = write_signatures(_raw(session, dataset, part), output, spec, near=near)
    left_out = sum(counts.get("left_out", {}).values())
    log.info("%s: %s documents, %s left out by filters", output, f"{counts['read']:,}", f"{left_out:,}")


@command("dataset", "first", "last")
@click.option("--share", type=(int, int), default=(0, 1), help="Number of this job, and of all jobs.")
@click.option("--output", type=FILE, required=True, help="Folder to write.")
def buckets(
    session: Session, dataset: str, first: str, last: str, share: tuple[int, int], output: Path
) -> None:
    """Find the earlier documents that share a hash or a band with those of the parts FIRST to LAST."""
    from spider.data.cleaning.buckets import write_buckets

    cleaning, parts = _cleaning(session, dataset), _parts(session, dataset, last)
    own = [one.part for one in parts if one.dataset == parts[-1].dataset]
    write_buckets(output, parts, len(parts) - len(own) + own.index(first), share, cleaning)


@command("dataset", "part")
@click.argument("buckets", nargs=-1, required=True, type=FILE)
def pairs(session: Session, dataset: str, part: str, buckets: tuple[Path, ...]) -> None:
    """Pair the documents of a part with earlier ones that they repeat, by the folders BUCKETS."""
    import pyarrow as pa

    from spider.data.cleaning.buckets import exact_pairs
    from spider.data.cleaning.evidence import SCHEMA, write
    from spider.data.cleaning.pairs import near_pairs

    cleaning, parts = _cleaning(session, dataset), _parts(session, dataset, part)
    found = SCHEMA.empty_table()
    if cleaning.exact:
        found = exact_pairs(parts, buckets)
        log.info("%s exact duplicates", f"{len(found):,}")
    if cleaning.near:
        near, candidates = near_pairs(parts, buckets, cleaning.near, session.config, session.results)
        found = pa.concat_tables([found, near])
        log.info("%s of %s candidates are near duplicates", f"{len(near):,}", f"{candidates:,}")
    write(_file(session, dataset, "pairs", part), found)


def _parts(session: Session, dataset: str, last: str) -> list[Part]:
    """Return the parts that a dataset is compared with, and its own up to one, in order."""
    from spider.data.cleaning.buckets import Part

    session.config.dataset(dataset).source.item(last)
    raw = session.config.raw(dataset)
    names = session.config.in_order(raw, last)
    return [Part(name, one, _file(session, name, "signatures", one)) for name, one in names]


@command("dataset", "first", "last")
def drop(session: Session, dataset: str, first: str, last: str) -> None:
    """Decide which documents of the parts FIRST to LAST are removed, and write the evidence."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from spider.data.cleaning.evidence import drop, write_removed

    cleaning = _cleaning(session, dataset)
    names = [(one.dataset, one.part) for one in _parts(session, dataset, last)]
    begin = names.index((names[-1][0], first))
    known = [
        (name, part, _file(session, name, "removed", part))
        for name, part in names[:begin]
        if session.config.cleaning(name)
    ]

    def pairs(part: str, **chosen: Any) -> pa.Table:
        files = [_file(session, dataset, step, part) for step in cleaning.steps]
        return pa.concat_tables([pq.read_table(file, **chosen) for file in files])

    total: Counter[str] = Counter()
    for part, rows in drop(names[-1][0], [part for _, part in names[begin:]], pairs, known):
        total.update(write_removed(_file(session, dataset, "removed", part), part, rows).counts)
    write_json(session.results.decided(session.config.raw(dataset), last), {"first": first, "removed": total})
    counts = ", ".join(f"{count:,} {reason}" for reason, count in total.items())
    log.info("%s: removed %s", dataset, counts or "nothing")


def _asked(session: Session, dataset: str) -> None:
    """Raise `ValueError` if a dataset is not compared with what models are measured with."""
    if not session.config.decontaminated(dataset):
        raise ValueError(f"datasets.{dataset}.cleaning.decontaminate: is false; set it, as in docs/data.md")


@command("dataset", "part")
def held_out(session: Session, dataset: str, part: str) -> None:
    """Copy the held-out documents of a part, so that training documents can be compared with them."""
    from spider.data.cleaning.decontaminate import write_held_out

    output = _file(session, dataset, "held_out", part)
    spec = session.config.dataset(dataset)
    count = write_held_out(_raw(session, dataset, part), output, dataset, spec)
    log.info("%s: %s held-out documents", output, f"{count:,}")


@command("dataset")
def protect(session: Session, dataset: str) -> None:
    """Collect the texts that models are measured with: held-out documents, tasks and files."""
    from spider.data.cleaning.decontaminate import write_protected
    from spider.evaluation.questions import protected_texts

    config, results = session.config, session.results
    _asked(session, dataset)
    parts = [(name, part) for name in config.protected(dataset) for part in config.parts(name)]
    held_out = [_file(session, name, "held_out", part) for name, part in parts]
    given = protected_texts(config, dataset)
    counts = write_protected(results.protected(config.raw(dataset)), given, held_out, SHORTEST)
    for name, (documents, short) in counts.items():
        unprotected = f"{short:,} with fewer than {SHORTEST} words cannot be protected"
        log.info("%s: %s documents or questions, %s", name, f"{documents:,}", unprotected)
    if not counts:
        log.warning("datasets.%s: no held-out document, task or file to compare with", dataset)


@command("dataset", "part")
def contaminated(session: Session, dataset: str, part: str) -> None:
    """Find the documents of a part that hold text which models are measured with."""
    from spider.data.cleaning.decontaminate import COMMON, find_contaminated
    from spider.data.cleaning.evidence import write

    config = session.config
    _asked(session, dataset)
    protected = session.results.protected(config.raw(dataset))
    output, parquet = _file(session, dataset, "contaminated", part), _raw(session, dataset, part)
    found, common = find_contaminated(parquet, part, config.dataset(dataset), protected)
    write(output, found)
    log.info("%s: %s documents with protected text", output, f"{len(found):,}")
    if common:
        reason = f"more than {COMMON} documents of the part hold them"
        log.info("%s sequences of held-out text do not count, because %s", f"{common:,}", reason)


@command("dataset", "[id]")
@click.option("--examples", default=10, show_default=True, help="Removed documents to list without an ID.")
def removed(session: Session, dataset: str, id: str | None, examples: int) -> None:
    """List why documents were removed, or show one, by its ID or PART/ROW, and what it repeats."""
    from spider.data.cleaning.evidence import listed, read, shown

    files = [_file(session, dataset, "removed", part) for part in session.config.parts(dataset)]
    if session.config.cleaning(dataset) is None:
        raise ValueError(f"datasets.{dataset}.cleaning: compares no documents, so none was removed")
    rows = [row for file in files for row in read(file).to_pylist()]
    config, results = session.config, session.results
    for line in listed(rows, examples) if id is None else shown(rows, id, dataset, config, results):
        click.echo(line)


# ----------------------------------------------------------------------------------------------------- shards


@command("dataset", "part")
@click.argument("file", type=FILE)
def encode(session: Session, dataset: str, part: str, file: Path) -> None:
    """Encode FILE, one part of a dataset, into a uint16 shard for each split."""
    from spider.data.cleaning.evidence import removed_rows
    from spider.data.encode import encode_part
    from spider.tokens import BYTES
    from spider.tokens.stored import read_tokens

    spec = session.config.dataset(dataset)
    folder = session.results.shards(dataset)
    if spec.source.TOKENS:
        spec.source.import_part(file, folder, part, spec)
    else:
        tokenizer = session.tokenizer_of(dataset)
        tokens = read_tokens(tokenizer) if tokenizer else BYTES
        encode_part(file, folder, part, spec, tokens, removed_rows(_removed(session, dataset, part)))
    for split in spec.splits:
        counts = read_json(folder / split / f"{part}.json")
        if split == "train":
            for reason, count in counts.get("rows", {}).get("left_out", {}).items():
                log.info("left out: %s documents, %s", f"{count:,}", reason)
        log.info("%s: %s documents, %s bytes", split, f"{counts['documents']:,}", f"{counts['bytes']:,}")


@command("dataset")
@click.option("--output", type=FILE, required=True, help="metadata.json to write.")
@THREADS
def index(session: Session, dataset: str, output: Path, threads: int | None) -> None:
    """Collect the records of all parts of a dataset into metadata.json."""
    from spider.data.shards import build_metadata, scored_groups

    spec, folder = session.config.dataset(dataset), output.parent
    parts = list(session.config.parts(dataset))
    if spec.source.TOKENS:
        origins = [spec.source.imported(part, folder / "train" / f"{part}.json") for part in parts]
    else:
        raw = session.config.raw(dataset)
        origins = [read_json(session.results.raw(raw, part).with_suffix(".json")) for part in parts]
    _check_held_out(session.config, dataset, folder)
    metadata = build_metadata(
        folder,
        dataset,
        spec,
        source=spec.source.changed() | {"files": origins},
        parts=parts,
        tokenizer=session.tokenizer_of(dataset),
        threads=threads or len(os.sched_getaffinity(0)),
    )
    for run in _scored_by(session.config, dataset):
        settings = session.config.runs[run].evaluation
        scored_groups(folder, settings.max_bytes, settings.largest_group)
    for split, counts in metadata.splits.items():
        log.info("%s: %s tokens in %d shards", split, f"{counts.tokens:,}", len(counts.shards))


def _scored_by(config: Config, dataset: str) -> list[str]:
    """Return the runs that are evaluated on a dataset."""
    return [run for run, block in config.runs.items() if dataset == (block.evaluation.data or block.dataset)]


def _check_held_out(config: Config, dataset: str, folder: Path) -> None:
    """Raise `ValueError` if no document is left, or a run is evaluated on an empty validation split."""
    from spider.data.shards import described_counts, left_out

    spec = config.dataset(dataset)
    scored_by = _scored_by(config, dataset)
    counts = dict.fromkeys(spec.splits, 0)
    for split, part in product(spec.splits, config.parts(dataset)):
        record = folder / split / f"{part}.json"
        counts[split] += read_json(record)["documents"] if record.exists() else 0
    if spec.cleaning and not any(counts.values()):
        gone = described_counts(left_out(folder, [*config.parts(dataset)]))
        raise ValueError(f"datasets.{dataset}.cleaning: leaves out all documents ({gone}); change that block")
    if not any(counts.values()):
        raise ValueError(f"datasets.{dataset}.source: holds no document; name files with text")
    if scored_by and not counts["validation"]:
        raise ValueError(
            f"datasets.{dataset}.validation: {spec.validation:g} holds out none of {sum(counts.values()):,} "
            f"documents, but runs.{scored_by[0]} is evaluated on it; raise it (with split_by it is a share "
            f"of groups), or set datasets.{dataset}.separator, which cuts a .txt into documents"
        )


@command("dataset")
@click.argument("seq_len", type=COUNT)
def pack(session: Session, dataset: str, seq_len: int) -> None:
    """Pack whole documents into rows of SEQ_LEN targets; only documents that are longer are split."""
    from spider.data.packing import pack

    session.config.dataset(dataset)
    packing = pack(session.results.shards(dataset), seq_len)
    filled = f"{packing.pieces:,} pieces of documents, {packing.filled:.2%} of the slots filled"
    log.info("%s: %s rows of %d, %s", dataset, f"{packing.rows:,}", seq_len, filled)


@command("run", "part")
@click.option("--output", type=FILE, required=True, help="File of counts to write.")
def count_ngrams(session: Session, run: str, part: str, output: Path) -> None:
    """Count the bytes after each context in one part of RUN's dataset, for an n-gram index."""
    from spider.data.ngram.store import count_part
    from spider.data.shards import load_metadata

    config, shards = _ngram_of(session, run)
    count_part(shards, load_metadata(shards), part, config, output)


@command("run")
@click.argument("counts", nargs=-1, required=True, type=FILE)
@click.option("--output", type=FILE, required=True, help="index.json to write.")
@click.option("--full", is_flag=True, help="Include the training split; training must not read this index.")
@THREADS
def build_ngrams(
    session: Session, run: str, counts: tuple[Path, ...], output: Path, full: bool, threads: int | None
) -> None:
    """Merge the COUNTS of all parts of RUN's dataset, in their order, into an n-gram index."""
    from spider.data.ngram.store import build
    from spider.data.shards import load_metadata

    config, shards = _ngram_of(session, run)
    splits = ["ngram", "train"] if full else ["ngram"]
    built = build(counts, load_metadata(shards), splits, config, output.parent, threads or 1)
    size = sum(file.size for file in built.files.values())
    contexts = sum(table.contexts for table in built.contexts.values())
    log.info("%s: %s contexts of %s bytes, %.0f MB", output, f"{contexts:,}", f"{built.bytes:,}", size / 1e6)


def _ngram_of(session: Session, run: str) -> tuple[NgramConfig, Path]:
    """Return the settings of a run's n-gram index, and the shards that it counts."""
    block = session.config.run(run)
    if block.model.ngram is None:
        raise ValueError(f"runs.{run}.model.ngram: is null, so the run has no n-gram index to count for")
    return block.model.ngram, session.results.shards(block.dataset)


@click.command()
@click.argument("folder", type=FILE)
@click.option("--quick", is_flag=True, help="Check sizes and indexes instead of the SHA-256 of every file.")
def verify(folder: Path, quick: bool) -> None:
    """Compare shards with their metadata.json, or the tables of an n-gram index with their index.json.

    Also name your own files that were edited since a workflow read them.
    """
    from spider.data.shards import verify
    from spider.provenance.made import edited_since

    if (folder / "index.json").exists():
        from spider.data.ngram import store

        index = store.open_index(folder).description if quick else store.verify(folder)
        click.echo(f"{folder}: {len(index.files)} files, {index.bytes:,} bytes counted, all match index.json")
        return
    report = verify(folder, full=not quick)
    content = f"{report['shards']} shards, {report['tokens']:,} tokens"
    click.echo(f"{folder}: {content}, all match metadata.json")
    root, name = root_of(folder), folder.resolve().name
    for file in edited_since(root, name) if root else ():
        click.echo(f"{file}: was edited since it was read; `snakemake datasets/{name}` reads it again")


@click.command()
@click.argument("folder", type=FILE)
@click.option("--bytes", "count", default=400, show_default=True, help="Bytes of text to print.")
@JSON
def inspect(folder: Path, count: int, as_json: bool) -> None:
    """Print the statistics of encoded shards and the beginning of their text."""
    from spider.data.shards import inspect

    statistics = inspect(folder, count)
    if as_json:
        click.echo(json.dumps(statistics, indent=2, ensure_ascii=False))
    else:
        click.echo(yaml.safe_dump(statistics, sort_keys=False, allow_unicode=True), nl=False)


_CLEANING = (signatures, buckets, pairs, held_out, protect, contaminated, drop, removed)
_DATASETS = (files, download, fetch, tokenizer, *_CLEANING, encode, index, pack, count_ngrams, build_ngrams)
for one in (*_DATASETS, verify, inspect):
    data.add_command(one)
