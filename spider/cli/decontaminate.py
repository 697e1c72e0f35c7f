"""Commands of `spider data` that find documents with text that models are measured with."""

from __future__ import annotations

from spider.cli.session import Session, command, log
from spider.config.cleaning import DecontaminateConfig


def _settings(session: Session, dataset: str) -> DecontaminateConfig:
    settings = session.config.decontaminated(dataset)
    if settings is None:
        raise ValueError(f"datasets.{dataset}.cleaning.decontaminate: is null; set it, as in docs/data.md")
    return settings


@command("dataset", "part")
def held_out(session: Session, dataset: str, part: str) -> None:
    """Copy the held-out documents of a part, so that training documents can be compared with them."""
    from spider.data.cleaning.decontaminate import write_held_out

    config, results = session.config, session.results
    spec = config.dataset(dataset)
    parquet = results.raw(config.raw(dataset), part)
    output = results.cleaning(config.raw(dataset), "held_out", part)
    count = write_held_out(parquet, output, dataset, spec)
    log.info("%s: %s held-out documents", output, f"{count:,}")


@command("dataset")
def protect(session: Session, dataset: str) -> None:
    """Collect the texts that models are measured with: held-out documents, tasks and files."""
    from spider.data.cleaning.decontaminate import write_protected
    from spider.evaluation import protected

    config, results = session.config, session.results
    settings = _settings(session, dataset)
    held_out = [
        results.cleaning(name, "held_out", part)
        for name in config.protected(dataset)
        for part in config.parts(name)
    ]
    output = results.protected(config.raw(dataset))
    given = protected.given(config, dataset)
    counts = write_protected(output, given, held_out, settings.SHORTEST)
    for name, (documents, short) in counts.items():
        unprotected = f"{short:,} with fewer than {settings.SHORTEST} words cannot be protected"
        log.info("%s: %s documents or questions, %s", name, f"{documents:,}", unprotected)
    if not counts:
        log.warning("datasets.%s: no held-out document, task or file to compare with", dataset)


@command("dataset", "part")
def contaminated(session: Session, dataset: str, part: str) -> None:
    """Find the documents of a part that hold text which models are measured with."""
    from spider.data.cleaning.decontaminate import find_contaminated
    from spider.data.cleaning.evidence import write

    config, results = session.config, session.results
    settings = _settings(session, dataset)
    raw = config.raw(dataset)
    parquet, protected = results.raw(raw, part), results.protected(raw)
    output = results.cleaning(raw, "contaminated", part)
    found, common = find_contaminated(parquet, part, config.dataset(dataset), protected, settings)
    write(output, found)
    log.info("%s: %s documents with protected text", output, f"{len(found):,}")
    if common:
        reason = f"more than {settings.COMMON} documents of the part hold them"
        log.info("%s sequences of held-out text do not count, because %s", f"{common:,}", reason)
