"""Check which vocabulary each model reads.

A model reads one vocabulary. The dataset of its run decides the size, so the configuration leaves it out. The
datasets of later stages must have the same vocabulary. The text of an evaluation may come from any dataset,
because it is decoded to bytes and encoded again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from spider.config.block import none_such
from spider.config.data import Dataset, TokenizerConfig
from spider.config.model import families, family_config
from spider.config.run import Run, weights_of

Datasets = Mapping[str, Dataset]
Tokenizers = Mapping[str, TokenizerConfig]


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
