"""Outputs that other code has made than the code that stands here now."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from spider.provenance.lineage import Lineage


def other_code(root: Path) -> dict[str, tuple[str, list[str]]]:
    """Return the outputs of a results folder whose modules were edited since, with their rule and modules.

    A module counts if the job that made an output had imported it. Outputs of jobs without a record of their
    code are left out.
    """
    lineage = Lineage(root)
    found: dict[str, tuple[str, list[str]]] = {}
    for job in lineage.jobs:
        edited = lineage.edited(job)
        for file in job.outputs:
            found.pop(file.path, None)
            if edited:
                found[file.path] = (job.rule, edited)
    return found


def by_rule(made: Iterable[tuple[str, list[str]]]) -> list[str]:
    """Return a line for each rule: ``encode: made by other code (spider/data/encode.py)``."""
    rules: dict[str, dict[str, None]] = {}
    for rule, modules in made:
        rules.setdefault(rule, {}).update(dict.fromkeys(modules))
    return [f"{rule}: made by other code ({', '.join(modules)})" for rule, modules in rules.items()]
