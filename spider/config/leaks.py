"""Refuse a run that learns from the text it is scored on.

The hash of a document's key decides its split (`spider.data.split`). The lowest share of all hashes is held
out, the next share is kept for the n-gram index, and the rest is trained on. Two datasets that read the same
file by the same key give a document the same hash. One may then be scored by a model that learned from the
other, as long as the other learns only from hashes above those that the first one holds out.

A configuration shows this for files of the same kind. It cannot show that files of two sources hold different
documents, so `undecided` says where the answer stays open. The evaluation counts copied text in any case
(`spider.evaluation.overlap`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from spider.config.data import Dataset, Files, TokenizerConfig
from spider.config.run import Run, weights_of

Datasets = Mapping[str, Dataset]
Tokenizers = Mapping[str, TokenizerConfig]

#: Sums of shares are compared up to this rounding error.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class _Learned:
    """Text that a run learns from: the documents of a dataset whose hash is at least ``limit``."""

    data: str
    limit: float
    how: str
    """Clause for messages: ``stage main trains on it``."""


def leak_problems(datasets: Datasets, tokenizers: Tokenizers, run: Run) -> Iterator[str]:
    """Yield a line for each dataset that shares documents to score with what the run learns from."""
    scored = run.evaluation.data or run.dataset
    refused: set[str] = set()
    for learned in _learned(datasets, tokenizers, run):
        if scored not in datasets or learned.data in refused:
            continue
        reason = _refusal(datasets, scored, learned)
        if reason is not None:
            refused.add(learned.data)
            yield f"evaluation.data: {reason}"


def undecided(datasets: Datasets, tokenizers: Tokenizers, run: Run) -> list[str]:
    """Return a line for each dataset whose overlap with the scored text the configuration does not show."""
    scored = run.evaluation.data or run.dataset
    doubts: dict[str, str] = {}
    for learned in _learned(datasets, tokenizers, run):
        doubt = _doubt(datasets, scored, learned)
        if doubt is not None:
            doubts.setdefault(learned.data, f"evaluation.data: {doubt}")
    source = datasets[run.dataset].source
    if source.own_tokenizer is not None:
        elsewhere = f"the tokenizer {source.own_tokenizer} comes from elsewhere"
        cannot = f"whether it was learned from documents that {scored!r} holds out"
        doubts[""] = f"evaluation.data: {elsewhere}; the configuration cannot show {cannot}"
    return list(doubts.values())


def shared_file(one: Dataset, other: Dataset) -> str | None:
    """Return a file whose text two datasets learn from, or None."""
    shared = _shared(one.source.learned_files(), other.source.learned_files())
    return shared[0] if shared else None


def _learned(datasets: Datasets, tokenizers: Tokenizers, run: Run) -> Iterator[_Learned]:
    """Yield all text that a run learns from: by its n-gram index, its tokenizer, and each of its stages."""
    if run.model.ngram is not None and run.dataset in datasets:
        yield _Learned(run.dataset, datasets[run.dataset].validation, "the n-gram index counts it")
    name = datasets[run.dataset].tokenizer if run.dataset in datasets else None
    if name is not None and name in tokenizers and tokenizers[name].data in datasets:
        data = tokenizers[name].data
        yield _Learned(data, datasets[data].validation, f"tokenizer {name} is learned from it")
    for stage in run.stages:
        for data in weights_of(run.data_of(stage)):
            if data in datasets:
                limit = datasets[data].validation + datasets[data].ngram
                yield _Learned(data, limit, f"stage {stage.name} trains on it")


def _refusal(datasets: Datasets, scored: str, learned: _Learned) -> str | None:
    """Return why a run that learns from one dataset must not be scored on another, or None."""
    held, other = datasets[scored], datasets[learned.data]
    shared = _shared(held.source.held_out_files(), other.source.learned_files())
    if scored == learned.data or shared is None:
        return None
    file, by_one_name = shared
    share = f"{scored!r} and {learned.data!r} ({learned.how}) share {file}"
    instead = f"or evaluate on {learned.data!r}"
    if held.source.TOKENS:
        return f"{share}, which {scored!r} holds out; take it out of one of them"
    if not by_one_name:
        differ = "a folder names documents by their paths in it, so the two hold out different documents"
        return f"{share}, but {differ}; name the same path in both"
    for key in ("id_column", "split_by"):
        if getattr(held, key) != getattr(other, key):
            differ = f"hold out different documents of it, because their {key} differs"
            return f"{share}, but {differ}; give both the same {key}, {instead}"
    if learned.limit < held.validation - _ROUNDING:
        less = f"{learned.data!r} holds out less of it (validation: {other.validation:g}"
        remedy = f"set datasets.{learned.data}.validation: {held.validation:g}, {instead}"
        return f"{share}, but {less}, and validation: {held.validation:g} in {scored!r}); {remedy}"
    return None


def _doubt(datasets: Datasets, scored: str, learned: _Learned) -> str | None:
    """Return why the configuration does not show that two datasets hold different documents, or None."""
    held, other = datasets[scored], datasets[learned.data]
    mine = held.source.held_out_files()
    theirs = other.source.learned_files()
    cannot = "; the configuration cannot show whether"
    by = f"{learned.data!r} ({learned.how})"
    if scored == learned.data:
        return None
    if _shared(mine, theirs) is not None:
        if held.text_column == other.text_column:
            return None
        return f"{scored!r} and {by} differ in text_column{cannot} a text without an id is in both"
    if mine.origin == theirs.origin and not mine.overlapping:
        return None
    return f"{scored!r} and {by} come from different files{cannot} these hold the same documents"


def _shared(mine: Files, theirs: Files) -> tuple[str, bool] | None:
    """Return a file that both read, and whether both call it by the same name; None without one.

    A folder shares the files below it, but names their documents by the paths inside it.
    """
    if mine.origin != theirs.origin:
        return None
    if same := mine.names & theirs.names:
        return min(same), True
    if mine.overlapping:
        pairs = [sorted((one, other), key=len) for one in mine.names for other in theirs.names]
        inside = [path for folder, path in pairs if path.startswith(folder.rstrip(os.sep) + os.sep)]
        if inside:
            return min(inside), False
    return None
