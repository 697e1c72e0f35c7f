"""Verbs of datasets: bring a part here, encode it, index all parts; check and look at what was made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from spider.cli.session import FILE, JSON, Session, log, verb
from spider.config import HubSource, MockSource, PydocsSource
from spider.files import read_json, sha256, write_json


@verb("dataset", "part")
@click.option("--output", type=FILE, required=True)
def download(session: Session, dataset: str, part: str, output: Path) -> None:
    """Bring one part of a dataset here, as parquet."""
    from spider.data import hub, local, mock, pydocs

    spec = session.config.dataset(dataset)
    source, item = spec.source, spec.source.item(part)
    params = {"kind": source.kind, "item": item}
    with session.tracked("download", f"{dataset}/{part}", params, [], [output]) as job:
        if isinstance(source, MockSource):
            record = mock.write_mock(source.documents, output)
        elif isinstance(source, PydocsSource):
            record = pydocs.write_pydocs(int(part), source.pieces, output)
        elif isinstance(source, HubSource):
            record = hub.download_file(hub.HubFile(source.repo, source.revision, item), output)
        else:
            record = local.import_local(Path(item), output, spec)
        size, digest = output.stat().st_size, record.get("sha256") or sha256(output)
        origin = {"part": part, "name": item, "bytes": size, "sha256": digest}
        write_json(output.with_suffix(".json"), origin)  # for metadata.json
        job.metric("bytes", size)
    log.info("%s: %.1f MB from %s", output, size / 1e6, item)


@verb("dataset", "part")
@click.argument("parquet", type=FILE)
def encode(session: Session, dataset: str, part: str, parquet: Path) -> None:
    """Widen one parquet file into uint16 shards, one for each split."""
    from spider.data.encode import encode_part

    spec = session.config.dataset(dataset)
    settings = spec.encoding()
    folder = session.results.shards(dataset)
    outputs = [folder / split / f"{part}.bin" for split in spec.splits]
    with session.tracked("encode", f"{dataset}/{part}", settings, [parquet], outputs) as job:
        record = encode_part(parquet, folder, part, spec)
        for split, counts in record.items():
            for name in ("documents", "bytes"):
                job.metric(f"{split}/{name}", counts[name])
            log.info("%s: %s documents, %s bytes", split, f"{counts['documents']:,}", f"{counts['bytes']:,}")


@verb("dataset")
@click.option("--output", type=FILE, required=True)
def index(session: Session, dataset: str, output: Path) -> None:
    """Gather the parts' records into metadata.json."""
    from spider.data.metadata import build_metadata

    spec = session.config.dataset(dataset)
    settings, parts = spec.encoding(), spec.source.parts()
    records = [output.parent / "train" / f"{part}.json" for part in parts]
    origins = [read_json(session.results.raw(dataset, part).with_suffix(".json")) for part in parts]
    source = spec.source.described() | {"files": origins}
    with session.tracked("index", dataset, settings, records, [output]) as job:
        metadata = build_metadata(output.parent, dataset, spec, source=source, parts=parts)
        job.artifact(output)
        job.dataset(*session.dataset_card(dataset, metadata.digest), context="made")
        for split, counts in metadata.splits.items():
            job.metric(f"{split}/tokens", counts.tokens)
            log.info("%s: %s tokens in %d shards", split, f"{counts.tokens:,}", len(counts.shards))


@click.command()
@click.argument("folder", type=FILE)
@click.option("--quick", is_flag=True, help="Check sizes and indexes, not the SHA-256 of every byte.")
def verify(folder: Path, quick: bool) -> None:
    """Check a dataset's shards against its metadata.json."""
    from spider.data.shards import verify

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
        split["top_bytes"] = "  ".join(f"{chr(byte)!r} {share:.1%}" for byte, share in split["top_bytes"])
    _print(statistics)


def _print(values: dict[str, Any], indent: str = "") -> None:
    for key, value in values.items():
        nested = isinstance(value, dict)
        form = {int: ",", float: ".2f"}.get(type(value), "")
        click.echo(f"{indent}{key}:" if nested else f"{indent}{key}: {value:{form}}")
        if nested:
            _print(value, indent + "  ")
