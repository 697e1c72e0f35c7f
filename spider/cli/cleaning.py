"""Commands of `spider data` that find and list the documents that are left out of a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spider.cli.session import Session, command, log
from spider.config.data import SHORTEST, Cleaning

if TYPE_CHECKING:
    from spider.data.cleaning.pairs import Part


def _cleaning(session: Session, dataset: str, part: str) -> Cleaning:
    """Return how the documents of a part are compared. Raise `ValueError` if they are not."""
    session.config.dataset(dataset).source.item(part)
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


@command("dataset", "part")
def pairs(session: Session, dataset: str, part: str) -> None:
    """Pair the documents of a part with earlier ones that they repeat, exactly or for the most part."""
    import pyarrow as pa

    from spider.data.cleaning.evidence import SCHEMA, write
    from spider.data.cleaning.pairs import exact_pairs, near_pairs

    cleaning = _cleaning(session, dataset, part)
    *earlier, own = _parts(session, dataset, part)
    output = _file(session, dataset, "pairs", part)
    found = exact_pairs(own, earlier) if cleaning.exact else SCHEMA.empty_table()
    log.info("%s: %s exact duplicates", output, f"{len(found):,}")
    if cleaning.near:
        near, candidates = near_pairs(own, earlier, cleaning, session.config, session.results)
        found = pa.concat_tables([found, near])
        log.info("%s of %s candidates are near duplicates", f"{len(near):,}", f"{candidates:,}")
    write(output, found)


def _parts(session: Session, dataset: str, part: str) -> list[Part]:
    """Return the parts that come before a part, and this one."""
    from spider.data.cleaning.pairs import Part

    raw = session.config.raw(dataset)
    names = [*session.config.earlier(raw, part), (raw, part)]
    return [Part(name, one, _file(session, name, "signatures", one)) for name, one in names]


@command("dataset", "part")
def drop(session: Session, dataset: str, part: str) -> None:
    """Decide which documents of a part are removed, and write the evidence."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from spider.data.cleaning import evidence
    from spider.data.cleaning.evidence import drop

    cleaning = _cleaning(session, dataset, part)
    raw = session.config.raw(dataset)
    removed = {
        (name, one): _file(session, name, "removed", one)
        for name, one in session.config.earlier(raw, part)
        if session.config.cleaning(name)
    }
    found = [pq.read_table(_file(session, dataset, step, part)) for step in cleaning.steps]
    output = _file(session, dataset, "removed", part)

    def earlier(of: str, name: str) -> Any:
        known = (of, name) in removed
        return evidence.read(removed[of, name]) if known else evidence.SCHEMA.empty_table()

    record = evidence.write_removed(output, part, drop(raw, part, pa.concat_tables(found), earlier))
    counts = ", ".join(f"{count:,} {reason}" for reason, count in record.counts.items())
    log.info("%s: removed %s", output, counts or "nothing")


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
