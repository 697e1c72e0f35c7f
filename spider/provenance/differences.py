"""The first causes of a difference between two results.

Both lineages are walked from the results towards the raw files, job beside job. Where two jobs wrote the same
content, everything before them is equal for this purpose. Otherwise the jobs may differ themselves (settings,
code, packages, threads), or in their inputs, whose jobs are then compared. A difference that follows from an
earlier one is not reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from spider.provenance.lineage import Lineage, Made
from spider.tracking.records import flatten

#: Parameters that only name things.
_NAMES = ("run", "stage", "index", "data")
_ABSENT = "not set"


@dataclass(frozen=True)
class Cause:
    """A difference that follows from no other one."""

    kind: str
    """``setting``, ``module``, ``package``, ``file``, ``threads``, ``processor`` or ``input``."""
    what: str
    one: str
    other: str
    rules: tuple[str, ...] = field(compare=False)
    """Rules from the one that the difference enters to the compared result: what it can explain."""

    def __str__(self) -> str:
        values = f": {self.one} / {self.other}" if self.one or self.other else ""
        return f"{self.kind} {self.what}{values}  ({' -> '.join(self.rules)})"


class Comparison:
    """Compare a file of one lineage with a file of another."""

    def __init__(self, one: Lineage, other: Lineage) -> None:
        self.one = one
        self.other = other
        self._seen: set[tuple[str, str | None, str, str | None]] = set()

    def causes(self, one: Made, other: Made) -> list[Cause]:
        """Return the first causes of the difference, those of the raw files first, each once."""
        found = dict.fromkeys(self._causes(one, other, ()))
        return list(found)

    def _causes(self, one: Made, other: Made, rules: tuple[str, ...]) -> Iterator[Cause]:
        key = (one.path, one.digest, other.path, other.digest)
        if key in self._seen or self._same(one, other):
            return
        self._seen.add(key)
        if one.job is None or other.job is None:
            yield Cause("file", one.path, _origin(one), _origin(other), rules)
            return
        rules = (one.job.tags["spider.rule"], *rules)
        for a, b in _pairs(self.one.inputs(one), self.other.inputs(other)):
            if a is None or b is None:
                present = a or b
                assert present is not None
                yield Cause("input", present.path, "read" if a else "", "read" if b else "", rules)
            else:
                yield from self._causes(a, b, rules)
        yield from self._own(one, other, rules)

    def _same(self, one: Made, other: Made) -> bool:
        """Return whether the jobs of two files wrote the same content; without jobs, whether the files do."""
        if one.job is None or other.job is None:
            return self.one.content(one) == self.other.content(other)
        return _contents(self.one, one) == _contents(self.other, other)

    def _own(self, one: Made, other: Made, rules: tuple[str, ...]) -> Iterator[Cause]:
        """Yield the differences of two jobs themselves."""
        assert one.job is not None and other.job is not None
        for kind, a, b in (
            ("setting", _settings(one.job.params), _settings(other.job.params)),
            ("module", *_shared(self.one.code(one.job), self.other.code(other.job))),
            ("package", self.one.packages(one.job), self.other.packages(other.job)),
            ("", _machine(one.job.tags), _machine(other.job.tags)),
        ):
            for what in [*a, *(key for key in b if key not in a)]:
                values = str(a.get(what, _ABSENT)), str(b.get(what, _ABSENT))
                if values[0] != values[1]:
                    yield Cause(kind or what, what if kind else "", *values, rules)


def _settings(params: dict[str, Any]) -> dict[str, Any]:
    plain = {key.removeprefix("settings."): value for key, value in flatten(params).items()}
    return {key: value for key, value in plain.items() if key not in _NAMES}


def _shared(one: dict[str, Any], other: dict[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the modules that both jobs imported. If only one imported a module, the importer differs too."""
    a, b = one.get("modules", {}), other.get("modules", {})
    both = a.keys() & b.keys()
    return {name: a[name] for name in a if name in both}, {name: b[name] for name in b if name in both}


def _machine(tags: dict[str, str]) -> dict[str, str]:
    return {name: tags[f"spider.{name}"] for name in ("threads", "processor") if f"spider.{name}" in tags}


def _contents(lineage: Lineage, made: Made) -> list[object]:
    assert made.job is not None
    return [lineage.content(lineage.made(file)) for file in made.job.outputs]


def _origin(made: Made) -> str:
    return made.digest or "missing"


def _role(path: str) -> str:
    """Return a path without names of runs and datasets and without digests: ``shards/*/train/000.json``."""
    path = re.sub(r"^(raw|shards|runs|ngram|tokenizers|baselines|cleaning)/[^/]+", r"\1/*", path)
    return re.sub(r"[0-9a-f]{16}", "*", path)


def _pairs(ones: list[Made], others: list[Made]) -> Iterator[tuple[Made | None, Made | None]]:
    """Pair the inputs of two jobs: those of the same path, then those of the same role in order."""
    paths = {other.path: other for other in others}
    left = []
    for one in ones:
        if one.path in paths:
            yield one, paths.pop(one.path)
        else:
            left.append(one)
    roles = dict.fromkeys(_role(made.path) for made in [*left, *paths.values()])
    for role in roles:
        yield from zip_longest(
            [made for made in left if _role(made.path) == role],
            [made for made in paths.values() if _role(made.path) == role],
        )
