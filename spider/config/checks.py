"""Check the data of runs: that no run learns from the text it is scored on, and which vocabulary each reads.

The hash of a document's key decides its split (`spider.data.documents`). The lowest share of all hashes is
held out, the next share is kept for the n-gram index, and the rest is trained on. Two datasets that read the
same file by the same key give a document the same hash. One may then be scored by a model that learned from
the other, as long as the other learns only from hashes above those that the first one holds out. A
configuration shows this for files of the same kind. The evaluation counts copied text in any case
(`spider.evaluation.overlap`).

A model reads one vocabulary. The dataset of its run decides the size, so the configuration leaves it out. The
datasets of later stages must have the same vocabulary. The text of an evaluation may come from any dataset,
because it is decoded to bytes and encoded again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from spider.config.block import none_such
from spider.config.data import Dataset, Files, TokenizerConfig
from spider.config.model import families, family_config
from spider.config.run import Run, weights_of
from spider.config.tasks import in_chat_form

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


def data_problems(datasets: Datasets, tokenizers: Tokenizers, run: Run) -> Iterator[str]:
    """Yield a line for each problem of a run with what it reads, without the path of the run."""
    for name in weights_of(run.data).keys() - datasets.keys() - {run.dataset}:
        yield f"data.mix: {none_such('dataset', name, datasets)}"
    yield from _ngram_problems(datasets, run)
    yield from _chat_problems(datasets, run)
    scored = run.evaluation.data or run.dataset
    if (dataset := datasets.get(scored)) is None:
        yield f"evaluation.data: {none_such('dataset', scored, datasets)}"
    elif dataset.source.STREAMED:
        yield f"evaluation.data: {scored!r} is a stream and has no validation shards; name another dataset"
    elif dataset.validation == 0:
        yield f"evaluation.data: datasets.{scored}.validation must be above 0, to evaluate on it"
    elif run.evaluation.largest_group is not None and dataset.split_by is None:
        wanted = f"needs groups of documents; set datasets.{scored}.split_by, or leave it out"
        yield f"evaluation.largest_group: {wanted}"
    else:
        yield from leak_problems(datasets, tokenizers, run)


def _ngram_problems(datasets: Datasets, run: Run) -> Iterator[str]:
    """Yield the problems of a run whose model reads an n-gram index."""
    dataset = datasets.get(run.dataset)
    if run.model.ngram is None or dataset is None:
        return
    if run.compress is not None:
        reason = "the model needs its n-gram index, which is many times as large as the compressed file"
        yield f"compress: {reason}; leave compress or model.ngram out"
    if dataset.ngram == 0:
        reason = f"datasets.{run.dataset}.ngram is 0, so the n-gram index has no documents"
        yield f"model.ngram: {reason}; set that to the share of documents to count, such as 0.8"
    for i, stage in enumerate(run.stages):
        where = f"stages[{i}].data: the n-gram index is of {run.dataset}"
        names = list(weights_of(run.data_of(stage)))
        if names[0] != run.dataset:
            yield f"{where}; name that first, or leave model.ngram out"
        for other in (name for name in names if name != run.dataset and name in datasets):
            if file := shared_file(dataset, datasets[other]):
                reason = f"which shares {file} with {other}, so it may hold text that is trained on"
                yield f"{where}, {reason}; take the file out of one of them, or leave model.ngram out"


def _chat_problems(datasets: Datasets, run: Run) -> Iterator[str]:
    """Yield the tasks in chat form of a run without conversations."""
    names = {one for stage in run.stages for one in weights_of(run.data_of(stage))}
    if not names <= datasets.keys() or any(datasets[one].format == "chat" for one in names):
        return
    keys = [f"evaluation.tasks.{key}" for key, task in run.evaluation.tasks.items() if in_chat_form(task)]
    for key in keys:
        remedy = "train a stage on data of format: chat, or leave it out"
        yield f"{key}.chat: no stage of the run learns from conversations; {remedy}"


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


def tokenizer_of(datasets: Datasets, data: str) -> str | None:
    """Return the name or the path of the tokenizer that encoded a dataset; None for bytes or no dataset."""
    if data not in datasets:
        return None
    return datasets[data].source.own_tokenizer or datasets[data].tokenizer


def size_of(datasets: Datasets, tokenizers: Tokenizers, data: str) -> int | None:
    """Return the size of a dataset's vocabulary; None for bytes or a tokenizer that does not exist."""
    if data not in datasets:
        return None
    name = datasets[data].tokenizer
    learned = tokenizers[name].vocab_size if name and name in tokenizers else None
    return datasets[data].source.own_vocab_size or learned


def sized(run: Run, datasets: Datasets, tokenizers: Tokenizers) -> Run:
    """Return the run with the vocabulary size of its dataset in the block of its model."""
    if (size := size_of(datasets, tokenizers, run.dataset)) is None:
        return run
    model = run.model.model_copy(update={"vocab_size": size})
    return run.model_copy(update={"model": model})


def token_problems(datasets: Datasets, tokenizers: Tokenizers, runs: Mapping[str, Run]) -> Iterator[str]:
    """Yield a line for each problem, with the path of its key."""
    for name, tokenizer in tokenizers.items():
        where = f"tokenizers.{name}.data"
        if (dataset := datasets.get(tokenizer.data)) is None:
            yield f"{where}: {none_such('dataset', tokenizer.data, datasets)}"
        elif dataset.source.STREAMED:
            yield f"{where}: {tokenizer.data!r} is a stream, which is not stored; name another dataset"
        elif dataset.source.TOKENS:
            yield f"{where}: {tokenizer.data!r} has token ids instead of text; name another dataset"
    for name, dataset in datasets.items():
        if dataset.tokenizer is not None and dataset.tokenizer not in tokenizers:
            missing = none_such("tokenizer", dataset.tokenizer, tokenizers)
            yield f"datasets.{name}.tokenizer: {missing if tokenizers else missing.partition(' (')[0]}"
    for name, run in runs.items():
        yield from (f"runs.{name}.{problem}" for problem in _run_problems(run, datasets, tokenizers))


def _run_problems(run: Run, datasets: Datasets, tokenizers: Tokenizers) -> Iterator[str]:
    """Yield the problems of a run, without the path of the run."""
    tokenizer = tokenizer_of(datasets, run.dataset)
    size = size_of(datasets, tokenizers, run.dataset)
    if tokenizer and not run.model.ANY_TOKENS:
        others = [family for family in families() if family_config(family).ANY_TOKENS]
        remedy = f"use a dataset of bytes, or a model of family {' or '.join(others)}"
        family = f"the family {run.model.family} reads bytes"
        yield f"data: {run.dataset} is encoded by {tokenizer}, but {family}; {remedy}"
    elif run.model.vocab_size not in (None, size):
        decides = f"{tokenizer}: {size:,}" if size else f"bytes: {run.dataset} names no tokenizer"
        yield f"model.vocab_size: is decided by the dataset's tokenizer ({decides}); leave it out"
    if tokenizer and run.model.ngram is not None:
        remedy = "use a dataset of bytes, or leave the n-gram index out"
        yield f"model.ngram: counts bytes, but {run.dataset} is encoded by {tokenizer}; {remedy}"
    for i, stage in enumerate(run.stages):
        for data in weights_of(run.data_of(stage)):
            if data in datasets and (other := tokenizer_of(datasets, data)) != tokenizer:
                theirs = f"{data} has that of {other or 'bytes'}"
                ours = f"{run.dataset} that of {tokenizer or 'bytes'}"
                yield f"stages[{i}].data: all data must have the same vocabulary; {theirs}, {ours}"
