"""The first causes of a difference between two results.

Both lineages are walked from the results towards the raw files, job beside job. Where two jobs wrote the same
content, everything before them is equal for this purpose. Otherwise the jobs may differ themselves (settings,
code, packages, threads), or in their inputs, whose jobs are then compared. A difference that follows from an
earlier one is not reported. If the results are equal, nothing has to be explained, and all that differs is
reported with that remark.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from spider.provenance.lineage import Lineage, Made
from spider.provenance.made import Job, flatten

#: Parameters that only name things, or that follow from others: the tokenizer decides the size of the
#: vocabulary, and settings of the dataset the columns that are read. Files of tasks are inputs.
_NAMES = re.compile(r"run|stage|index|file|data|tokenizer|model\.vocab_size|columns|tasks\..*\.(file|folder)")
#: Where the parameters of a rule stand in the configuration.
_BLOCKS = {
    "count_ngrams": "model.ngram.",
    "build_ngrams": "model.ngram.",
    "pairs": "cleaning.",
}
#: Settings that decide the other keys of their block.
_CHOICES = ("model.family", "model.preset")
_ABSENT = "not set"


@dataclass(frozen=True)
class Cause:
    """A difference that follows from no other one."""

    kind: str
    """``setting``, ``module``, ``package``, ``file``, ``stage``, ``threads``, ``processor`` or ``input``."""
    what: str
    one: str
    other: str
    rules: tuple[str, ...] = field(compare=False)
    """Rules from the one that the difference enters to the compared result: what it can explain. Empty if
    both results are equal."""

    def __str__(self) -> str:
        values = f": {self.one} / {self.other}" if self.one or self.other else ""
        explains = " -> ".join(self.rules) or "nothing, both results are equal"
        return f"{' '.join(filter(None, (self.kind, self.what)))}{values}  (can explain {explains})"


class Comparison:
    """Compare a file of one lineage with a file of another."""

    def __init__(self, one: Lineage, other: Lineage) -> None:
        self.one = one
        self.other = other
        self._seen: set[tuple[str, str | None, str, str | None]] = set()
        self._prune = True

    def causes(self, one: Made, other: Made) -> list[Cause]:
        """Return the first causes of the difference, those of the raw files first, each once."""
        equal = self._same(one, other)
        found = [] if equal else list(dict.fromkeys(self._causes(one, other, ())))
        if found:
            return found
        # Two stages may end with the same weights and differ in their moving average.
        self._prune = False
        self._seen.clear()
        found = list(dict.fromkeys(self._causes(one, other, ())))
        return [replace(cause, rules=()) for cause in found] if equal else found

    def _causes(self, one: Made, other: Made, rules: tuple[str, ...]) -> Iterator[Cause]:
        key = (one.path, one.digest, other.path, other.digest)
        if key in self._seen or ((self._prune or one.job is None) and self._same(one, other)):
            return
        self._seen.add(key)
        if one.job is None or other.job is None:
            yield Cause("file", one.path, _origin(one, other), _origin(other, one), rules)
            return
        rules = (one.job.rule, *rules)
        extra = []
        for a, b in _pairs(self.one.inputs(one), self.other.inputs(other)):
            if a and b:
                a, b, more = self._aligned(a, b)
                yield from (Cause("stage", name, *values, rules) for name, values in more.items())
                yield from self._causes(a, b, rules)
            else:
                extra.append((a, b))
        own = list(self._own(one, other, rules))
        yield from own
        for a, b in extra:
            yield from self._extra(a, b, (one, other), rules, explained=bool(own))

    def _extra(
        self,
        a: Made | None,
        b: Made | None,
        of: tuple[Made, Made],
        rules: tuple[str, ...],
        *,
        explained: bool,
    ) -> Iterator[Cause]:
        """Yield the files that only one of two jobs depends on. Without any, a setting explains the input."""
        lineage, present = (self.one, a) if a else (self.other, b)
        assert present is not None
        known = {made.digest for made in (self.other if a else self.one).ancestry(of[1 if a else 0])}
        origins = [made for made in (present, *lineage.ancestry(present)) if made.job is None]
        new = [made for made in origins if made.digest not in known]
        values = ("read", "not read") if a else ("not read", "read")
        yield from (Cause("file", made.path, *values, rules) for made in new)
        if not new and not explained:
            yield Cause("input", present.path, *values, rules)

    def _aligned(self, one: Made, other: Made) -> tuple[Made, Made, dict[str, tuple[str, str]]]:
        """Return two receipts of the same stage, and the later stages that only one of both runs has."""
        ones, others = self._trained(self.one, one), self._trained(self.other, other)
        shared = next((name for name in ones if name in others), None)
        if shared is None:
            return one, other, {}
        more = {name: ("trained", "not trained") for name in list(ones)[: list(ones).index(shared)]}
        more |= {name: ("not trained", "trained") for name in list(others)[: list(others).index(shared)]}
        return ones[shared], others[shared], more

    def _trained(self, lineage: Lineage, made: Made) -> dict[str, Made]:
        """Return the receipts of a stage and of the stages before it by name, the last one first."""
        found = {}
        waiting = [made]
        while waiting and (job := waiting[0].job) and job.rule == "train":
            found[job.of.partition("/")[2]] = waiting[0]
            waiting = [one for one in lineage.inputs(waiting[0]) if one.path.endswith("/train.json")]
        return found

    def _same(self, one: Made, other: Made) -> bool:
        """Return whether the jobs of two files wrote the same content; without jobs, whether the files do."""
        if one.job is None or other.job is None:
            return self.one.content(one) == self.other.content(other)
        return _contents(self.one, one) == _contents(self.other, other)

    def _own(self, one: Made, other: Made, rules: tuple[str, ...]) -> Iterator[Cause]:
        """Yield the differences of two jobs themselves."""
        assert one.job is not None and other.job is not None
        for kind, a, b in (
            ("setting", _settings(one.job), _settings(other.job)),
            ("module", *_shared(self.one.code(one.job), self.other.code(other.job))),
            ("package", self.one.packages(one.job), self.other.packages(other.job)),
            ("", _machine(one.job), _machine(other.job)),
        ):
            values = {what: (str(a.get(what, _ABSENT)), str(b.get(what, _ABSENT))) for what in {**a, **b}}
            changed = {what: pair for what, pair in values.items() if pair[0] != pair[1]}
            chosen = [what for what in _CHOICES if what in changed]
            for what, pair in changed.items():
                if what in chosen or not (chosen and what.startswith("model.")):
                    yield Cause(kind or what, what if kind else "", *pair, rules)


def _settings(job: Job) -> dict[str, Any]:
    """Return the parameters of a job by their keys in the configuration, without names."""
    block = _BLOCKS.get(job.rule, "")
    # `settings` says what a digest in `identity` stands for.
    shown = job.params.get("settings") or job.params.get("identity")
    others = {name: value for name, value in job.params.items() if name not in ("settings", "identity")}
    plain = flatten(others | shown if isinstance(shown, dict) else others)
    plain = {key.removeprefix("settings."): value for key, value in plain.items()}
    return {f"{block}{key}": value for key, value in plain.items() if not _NAMES.fullmatch(key)}


def _shared(one: dict[str, Any], other: dict[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the modules that both jobs imported. If only one imported a module, the importer differs too."""
    a, b = one.get("modules", {}), other.get("modules", {})
    both = a.keys() & b.keys()
    return {name: a[name] for name in a if name in both}, {name: b[name] for name in b if name in both}


def _machine(job: Job) -> dict[str, str]:
    """Return what a job ran on."""
    return {"threads": str(job.threads)} | ({"processor": job.processor} if job.processor else {})


def _contents(lineage: Lineage, made: Made) -> list[object]:
    assert made.job is not None
    return [lineage.content(lineage.made(file)) for file in made.job.outputs]


def _origin(made: Made, beside: Made) -> str:
    """Return the digest of a file, with its path if it differs from that of the other one."""
    digest = (made.digest or "missing").removeprefix("sha256:")[:16]
    return digest if made.path == beside.path else f"{made.path} ({digest})"


def _role(made: Made) -> str:
    """Return a path without names and digests: ``shards/*/train/000.json``.

    The user's own file has its name.
    """
    if made.job is None and Path(made.path).is_absolute():
        return Path(made.path).name
    path = re.sub(r"^(raw|shards|ngram|tokenizers|baselines|cleaning)/[^/]+", r"\1/*", made.path)
    path = re.sub(r"^runs/[^/]+(/[^/]+(?=/))?", "runs/*", path)
    return re.sub(r"[0-9a-f]{16}", "*", path)


def _kind(made: Made) -> str:
    """Return the `_role` of a file, which is the same for all of the user's own files."""
    return "own" if made.job is None else _role(made)


def _pairs(ones: list[Made], others: list[Made]) -> Iterator[tuple[Made | None, Made | None]]:
    """Pair the inputs of two jobs: those of the same path, then those of the same role, then own files."""
    keys: list[Callable[[Made], str]] = [lambda made: made.path, _role, _kind]
    for key in keys:
        waiting: dict[str, list[Made]] = {}
        for other in others:
            waiting.setdefault(key(other), []).append(other)
        left = []
        for one in ones:
            if same := waiting.get(key(one)):
                yield one, same.pop(0)
            else:
                left.append(one)
        ones, others = left, [made for made in others if any(made is one for one in waiting[key(made)])]
    yield from ((one, None) for one in ones)
    yield from ((None, other) for other in others)
