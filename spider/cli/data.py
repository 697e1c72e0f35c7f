"""`spider data`: download, clean, encode, index, pack, verify; learn tokenizers; count n-grams."""

from __future__ import annotations

import json
import os
from itertools import product
from pathlib import Path

import click
import yaml

from spider.cli import cleaning
from spider.cli.session import COUNT, FILE, JSON, THREADS, Group, Session, command, log
from spider.common.files import read_json, sha256, write_json
from spider.common.results import root_of
from spider.config import Config
from spider.config.model import NgramConfig


@click.group(cls=Group)
def data() -> None:
    """Datasets: download, clean, encode, index, pack, verify; tokenizers and n-gram indexes."""


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


@command("tokenizer")
@click.argument("parquets", nargs=-1, required=True, type=FILE)
@click.option("--output", type=FILE, required=True, help="tokenizer.json to write.")
@THREADS
def tokenizer(
    session: Session, tokenizer: str, parquets: tuple[Path, ...], output: Path, threads: int | None
) -> None:
    """Learn a tokenizer from the parquet files of its dataset."""
    if threads:
        os.environ["RAYON_NUM_THREADS"] = str(threads)  # read by the library tokenizers
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


_MEASURED = (cleaning.held_out, cleaning.protect, cleaning.contaminated)
_STEPS = (cleaning.signatures, cleaning.pairs, *_MEASURED, cleaning.drop)
_DATASETS = (download, tokenizer, *_STEPS, encode, index, pack, count_ngrams, build_ngrams)
for one in (*_DATASETS, verify, inspect, cleaning.removed):
    data.add_command(one)
