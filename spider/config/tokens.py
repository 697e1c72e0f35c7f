"""Which alphabet each model reads: what no block can see by itself.

A model reads one. That of its run's dataset decides how many ids it has, so nobody writes that down; the
datasets of later stages must be written in the same one. The text that it is evaluated on may come from any:
it is taken as bytes, and encoded anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from spider.config.block import none_such
from spider.config.data import Dataset, StreamSource, TokenizerConfig, TokensSource
from spider.config.model import families, family_config
from spider.config.run import Run

Datasets = Mapping[str, Dataset]
Tokenizers = Mapping[str, TokenizerConfig]


def tokenizer_of(datasets: Datasets, data: str) -> str | None:
    """Name of the tokenizer that a dataset is written in, or path of its model; None for bytes, or where
    there is none such."""
    if data not in datasets:
        return None
    source = datasets[data].source
    return source.model if isinstance(source, TokensSource) else datasets[data].tokenizer


def size_of(datasets: Datasets, tokenizers: Tokenizers, data: str) -> int | None:
    """How many ids a dataset is written in; None for bytes, or a tokenizer that there is not."""
    if data not in datasets:
        return None
    source, name = datasets[data].source, datasets[data].tokenizer
    if isinstance(source, TokensSource):
        return source.vocab_size
    return tokenizers[name].vocab_size if name and name in tokenizers else None


def sized(run: Run, datasets: Datasets, tokenizers: Tokenizers) -> Run:
    """A run whose model has as many ids as its dataset is written in."""
    if (size := size_of(datasets, tokenizers, run.data)) is None:
        return run
    model = run.model.model_copy(update={"vocab_size": size})
    return run.model_copy(update={"model": model})


def token_problems(datasets: Datasets, tokenizers: Tokenizers, runs: Mapping[str, Run]) -> Iterator[str]:
    """A line for each, with the path of its key."""
    for name, tokenizer in tokenizers.items():
        where = f"tokenizers.{name}.data"
        if (dataset := datasets.get(tokenizer.data)) is None:
            yield f"{where}: {none_such('dataset', tokenizer.data, datasets)}"
        elif isinstance(dataset.source, StreamSource):
            yield f"{where}: {tokenizer.data!r} is a stream, of which nothing is kept; name another"
        elif isinstance(dataset.source, TokensSource):
            yield f"{where}: {tokenizer.data!r} is of ids, its text is not there to learn from; name another"
    for name, dataset in datasets.items():
        if dataset.tokenizer is not None and dataset.tokenizer not in tokenizers:
            missing = none_such("tokenizer", dataset.tokenizer, tokenizers)
            yield f"datasets.{name}.tokenizer: {missing if tokenizers else missing.partition(' (')[0]}"
    for name, run in runs.items():
        yield from (f"runs.{name}.{problem}" for problem in _run_problems(run, datasets, tokenizers))


def _run_problems(run: Run, datasets: Datasets, tokenizers: Tokenizers) -> Iterator[str]:
    tokenizer = tokenizer_of(datasets, run.data)
    size = size_of(datasets, tokenizers, run.data)
    if tokenizer and not run.model.ANY_TOKENS:
        others = [family for family in families() if family_config(family).ANY_TOKENS]
        remedy = f"use a dataset of bytes, or a model of family {' or '.join(others)}"
        yield f"data: {run.data} is written in {tokenizer}, and the {run.model.family} reads bytes; {remedy}"
    elif run.model.vocab_size not in (None, size):
        decides = f"{tokenizer}: {size:,}" if size else f"bytes: {run.data} names no tokenizer"
        yield f"model.vocab_size: is decided by the dataset's tokenizer ({decides}); leave it out"
    if tokenizer and run.model.memory is not None:
        remedy = "use a dataset of bytes, or leave the memory out"
        yield f"model.memory: proposes bytes, and {run.data} is written in {tokenizer}; {remedy}"
    for i, stage in enumerate(run.stages):
        data = stage.data or run.defaults.data or run.data
        if data in datasets and (other := tokenizer_of(datasets, data)) != tokenizer:
            written = f"{data} is written in {other or 'bytes'}, and {run.data} in {tokenizer or 'bytes'}"
            yield f"stages[{i}].data: {written}; one model reads one alphabet"
