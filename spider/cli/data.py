"""Commands of datasets: fetch a part, encode it, index all parts; check and inspect the result."""

from __future__ import annotations

import json
import os
from itertools import product
from pathlib import Path
from typing import Any

import click

from spider import tracking
from spider.cli.session import FILE, JSON, THREADS, Session, command, log
from spider.config import Config
from spider.config.ngram import NgramConfig
from spider.files import read_json, sha256, write_json


@command("dataset", "part")
@click.option("--output", type=FILE, required=True)
def download(session: Session, dataset: str, part: str, output: Path) -> None:
    """Fetch one part of a dataset, as parquet."""
    spec, parts = session.config.dataset(dataset), session.config.parts(dataset)
    if part not in parts:
        raise ValueError(f"datasets.{dataset}: no part {part!r}; there are {len(parts)}, from 000")
    item = parts[part]
    params = {"kind": spec.source.kind, "item": item}
    made = [output, output.with_suffix(".json")]
    with session.tracked("download", f"{dataset}/{part}", params, [], made) as job:
        spec.source.fetch(part, output, spec)
        size = output.stat().st_size
        origin = {"part": part, "name": item, "bytes": size, "sha256": sha256(output)}
        write_json(output.with_suffix(".json"), origin)  # for metadata.json
        job.metric("bytes", size)
    log.info("%s: %.1f MB from %s", output, size / 1e6, item)


@command("tokenizer")
@click.argument("parquets", nargs=-1, required=True, type=FILE)
@click.option("--output", type=FILE, required=True, help="tokenizer.json to write.")
@THREADS
def tokenizer(
    session: Session, tokenizer: str, parquets: tuple[Path, ...], output: Path, threads: int | None
) -> None:
    """Learn a tokenizer from the parts of its dataset."""
    if threads:
        os.environ["RAYON_NUM_THREADS"] = str(threads)  # of the library that learns it
    from spider.data.tokenizer import learn

    config = session.config.tokenizer(tokenizer)
    dataset = session.config.dataset(config.data)
    with session.tracked("tokenizer", tokenizer, config.changed(), [*parquets], [output]) as job:
        learned = learn(parquets, output, tokenizer, config, dataset)
        job.metric("vocab_size", learned.size)
        job.artifact(output)
    log.info("%s: %s ids, %s of them merges", output, f"{learned.size:,}", f"{len(learned.merges):,}")


@command("dataset", "part")
@click.argument("file", type=FILE)
def encode(session: Session, dataset: str, part: str, file: Path) -> None:
    """Make the uint16 shards of one part, one for each split, from FILE."""
    from spider.data.encode import encode_part
    from spider.tokens import BYTES
    from spider.tokens.stored import read_tokens

    spec = session.config.dataset(dataset)
    settings, learned = spec.encoding(), session.tokenizer_of(dataset)
    folder = session.results.shards(dataset)
    shards = [folder / split / f"{part}.bin" for split in spec.splits]  # `index` hashes them
    outputs = [shard.with_suffix(suffix) for shard in shards for suffix in (".idx", ".json")]
    inputs = [file, learned] if learned else [file]
    with session.tracked("encode", f"{dataset}/{part}", settings, inputs, outputs, shards) as job:
        if spec.source.TOKENS:
            record = spec.source.import_part(file, folder, part, spec)
        else:
            record = encode_part(file, folder, part, spec, read_tokens(learned) if learned else BYTES)
        for split, counts in record.items():
            for name in ("documents", "bytes"):
                job.metric(f"{split}/{name}", counts[name])
            log.info("%s: %s documents, %s bytes", split, f"{counts['documents']:,}", f"{counts['bytes']:,}")


@command("dataset")
@click.option("--output", type=FILE, required=True)
@THREADS
def index(session: Session, dataset: str, output: Path, threads: int | None) -> None:
    """Gather the parts' records into metadata.json."""
    from spider.data.metadata import build_metadata

    spec = session.config.dataset(dataset)
    settings, parts = spec.encoding(), list(session.config.parts(dataset))
    records = [output.parent / "train" / f"{part}.json" for part in parts]
    raw = spec.like or dataset
    learned = session.tokenizer_of(dataset)
    inputs = [*records, learned] if learned else records
    if spec.source.TOKENS:
        origins = [spec.source.imported(part, record) for part, record in zip(parts, records, strict=True)]
    else:
        downloaded = [session.results.raw(raw, part).with_suffix(".json") for part in parts]
        origins = [read_json(record) for record in downloaded]
        inputs = [*inputs, *downloaded]
    source = spec.source.changed() | {"files": origins}
    _check_held_out(session.config, dataset, output.parent)
    with session.tracked("index", dataset, settings, inputs, [output]) as job:
        metadata = build_metadata(
            output.parent,
            dataset,
            spec,
            source=source,
            parts=parts,
            tokenizer=learned,
            threads=threads or len(os.sched_getaffinity(0)),
        )
        job.artifact(output)
        job.dataset(*session.dataset_card(dataset, metadata.digest), context="made")
        shards = [shard for split in metadata.splits.values() for shard in split.shards]
        tracking.log_hashes(job, {output.parent / shard.file: shard.sha256 for shard in shards})
        for split, counts in metadata.splits.items():
            job.metric(f"{split}/tokens", counts.tokens)
            log.info("%s: %s tokens in %d shards", split, f"{counts.tokens:,}", len(counts.shards))


def _check_held_out(config: Config, dataset: str, folder: Path) -> None:
    """Raise `ValueError` where a run is scored on a dataset that holds out none of its documents."""
    spec = config.dataset(dataset)
    scored_by = [
        run for run, block in config.runs.items() if dataset == (block.evaluation.data or block.data)
    ]
    counts = dict.fromkeys(spec.splits, 0)
    for split, part in product(spec.splits, config.parts(dataset)):
        record = folder / split / f"{part}.json"
        counts[split] += read_json(record)["documents"] if record.exists() else 0
    if scored_by and not counts["validation"]:
        raise ValueError(
            f"datasets.{dataset}.validation: {spec.validation:g} holds out none of {sum(counts.values()):,} "
            f"documents, and runs.{scored_by[0]} is evaluated on it; raise it (with split_by it is a share "
            "of groups)"
        )


@command("dataset", "seq_len")
def pack(session: Session, dataset: str, seq_len: str) -> None:
    """Plan rows of SEQ_LEN targets that hold whole documents, as far as they fit."""
    from spider.data.packing import pack

    if not seq_len.isdecimal() or not int(seq_len):
        raise ValueError(f"seq_len: must be a whole number above 0 (got {seq_len!r})")
    session.config.dataset(dataset)
    folder = session.results.shards(dataset)
    params, made = {"seq_len": int(seq_len)}, folder / f"packed-{seq_len}.json"
    outputs = [made, made.with_suffix(".pieces"), made.with_suffix(".rows")]
    with session.tracked("pack", f"{dataset}/{seq_len}", params, [folder / "metadata.json"], outputs) as job:
        packing = pack(folder, int(seq_len))
        job.metric("filled", packing.filled)
    filled = f"{packing.pieces:,} pieces of documents, {packing.filled:.2%} of the slots filled"
    log.info("%s: %s rows of %s, %s", made, f"{packing.rows:,}", seq_len, filled)


@command("run", "part")
@click.option("--output", type=FILE, required=True)
def count_ngrams(session: Session, run: str, part: str, output: Path) -> None:
    """Count what follows what in one part of RUN's dataset, for an n-gram index."""
    from spider.data.metadata import load_metadata
    from spider.ngram.store import count_part

    name, config = session.config.run(run).data, _ngram_of(session, run)
    shards = session.results.shards(name)
    with session.tracked("count", f"{name}/{part}", config.changed(), [shards / "metadata.json"], [output]):
        count_part(shards, load_metadata(shards), part, config, output)


@command("run")
@click.argument("counts", nargs=-1, required=True, type=FILE)
@click.option("--output", type=FILE, required=True, help="index.json to write.")
@click.option("--full", is_flag=True, help="With the training text, to be read with and not trained with.")
@THREADS
def build_ngrams(
    session: Session, run: str, counts: tuple[Path, ...], output: Path, full: bool, threads: int | None
) -> None:
    """Merge the COUNTS of all parts of RUN's dataset, in their order, into an n-gram index."""
    from spider.data.metadata import load_metadata
    from spider.ngram.store import build

    name, config = session.config.run(run).data, _ngram_of(session, run)
    splits = ["ngram", "train"] if full else ["ngram"]
    with session.tracked(
        "ngram", f"{name}/{output.parent.name}", config.changed(), [*counts], [output]
    ) as job:
        metadata = load_metadata(session.results.shards(name))
        made = build(counts, metadata, splits, config, output.parent, threads or 1)
        size = sum(file.size for file in made.files.values())
        contexts = sum(table.contexts for table in made.contexts.values())
        job.metric("bytes", size)
    held = f"{contexts:,} contexts of {made.bytes:,} bytes"
    log.info("%s: %s, %.0f MB", output.parent, held, size / 1e6)


def _ngram_of(session: Session, run: str) -> NgramConfig:
    config = session.config.run(run).model.ngram
    if config is None:
        raise ValueError(f"runs.{run}.model.ngram: is null, there is nothing to count")
    return config


@click.command()
@click.argument("folder", type=FILE)
@click.option("--quick", is_flag=True, help="Check sizes and indexes, not the SHA-256 of every byte.")
def verify(folder: Path, quick: bool) -> None:
    """Check a dataset's shards against its metadata.json, or an index's tables against its index.json."""
    from spider.data.shards import verify

    if (folder / "index.json").exists():
        from spider.ngram import store

        described = store.open_index(folder).description if quick else store.verify(folder)
        held = f"{len(described.files)} files, {described.bytes:,} bytes counted"
        click.echo(f"{folder}: {held}, all as index.json says")
        return
    report = verify(folder, full=not quick)
    click.echo(f"{folder}: {report['shards']} shards, {report['tokens']:,} tokens, all as metadata.json says")


@click.command()
@click.argument("folder", type=FILE)
@click.option("--bytes", "count", default=400, show_default=True, help="How much text of the first shard.")
@JSON
def inspect(folder: Path, count: int, as_json: bool) -> None:
    """Print a dataset's statistics and the beginning of its text."""
    from spider.data.shards import inspect

    statistics = inspect(folder, count)
    if as_json:
        click.echo(json.dumps(statistics, indent=2, ensure_ascii=False))
        return
    for split in statistics["splits"].values():
        split["top"] = "  ".join(f"{text!r} {share:.1%}" for text, share in split["top"])
    _print(statistics)


def _print(values: dict[str, Any], indent: str = "") -> None:
    for key, value in values.items():
        nested = isinstance(value, dict)
        form = {int: ",", float: ".2f"}.get(type(value), "")
        click.echo(f"{indent}{key}:" if nested else f"{indent}{key}: {value:{form}}")
        if nested:
            _print(value, indent + "  ")
