"""Generating a byte with an n-gram index takes the same work at every position of a document."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from statistics import median

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spider.data.ngram import candidates
from spider.evaluation.generate import generate
from spider.model.interface import Reader
from spider.tokens import BYTES
from tests.families.toy.config import Config
from tests.families.toy.model import Toy
from tests.unit.ngram.small_index import CONFIG
from tests.unit.ngram.texts import WORDS


class Newest(Reader):
    """Read new tokens alone, which is exact for a model whose logits depend on one position."""

    def read(self, N: int) -> torch.Tensor:
        return self.model(self.ids_RT[:, -N:], candidates_BTW=self.candidates[-1]).logits


class Positional(Toy):
    def incremental(self, context: int, n_loops: int | None = None) -> Reader:
        return Newest(self, context, n_loops)


@pytest.fixture(scope="module")
def model(lookup) -> Positional:
    torch.manual_seed(0)
    model = Positional(Config(width=8, ngram=CONFIG)).eval()
    model.reset_parameters()
    with torch.no_grad():
        for parameter in model.ngram.parameters():
            parameter.normal_(0, 0.1)
    model.lookup = lookup
    return model


def prompt_of(size: int) -> bytes:
    rng = random.Random(0)
    return " ".join(rng.choices(WORDS, k=size)).encode()[:size]


class Elements(TorchDispatchMode):
    """Count the elements that torch operations write; a view writes none."""

    written = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.written += sum(
                leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)
            )
        return result


def work_of_a_byte(model: Positional, before: int, monkeypatch) -> dict[str, float]:
    """Return the median work of each of the 16 bytes after so many, in three measures."""
    added = [0]
    extend_chain = candidates._extend_chain

    def counted(contexts, *arguments):
        added[0] += len(contexts)
        return extend_chain(contexts, *arguments)

    rows = []
    with monkeypatch.context() as patched, Elements() as elements:
        patched.setattr(candidates, "_extend_chain", counted)
        written = generate(model, prompt_of(before), max_bytes=50, seed=2, context=70_000, top_k=40)
        next(written)
        tracemalloc.start()
        for _ in range(16):
            added[0] = 0
            elements.written = 0
            tracemalloc.reset_peak()
            held, _ = tracemalloc.get_traced_memory()
            next(written)
            rows.append((added[0], elements.written, tracemalloc.get_traced_memory()[1] - held))
        tracemalloc.stop()
    names = "symbols added", "elements written", "bytes allocated"
    return dict(zip(names, map(median, zip(*rows, strict=True)), strict=True))


def test_a_byte_takes_the_same_work_after_1000_and_after_60000(model, monkeypatch):
    near, far = (work_of_a_byte(model, before, monkeypatch) for before in (1000, 60_000))
    assert near["symbols added"] == far["symbols added"] == len(CONFIG.matches)
    for what, amount in far.items():
        assert amount <= 1.3 * near[what], (what, near, far)


@pytest.mark.parametrize("sizes", [[1], [7, 1, 300], [5000]])
def test_a_reader_keeps_all_candidates_in_order(model, sizes):
    """The base reader reads its whole stream again, with all candidates."""
    ids = BYTES.encode(prompt_of(700))[:-1]
    candidates_NW = torch.from_numpy(model.lookup.after(ids, 0, len(ids)))
    reader = Reader(model, context=701)
    at = 0
    for size in itertools.cycle(sizes):
        piece = ids[at : at + size].tolist()
        logits = reader.extend(piece, candidates_NW[at : at + size])
        at += len(piece)
        assert torch.equal(torch.cat(reader.candidates, dim=1)[0], candidates_NW[:at])
        with torch.no_grad():
            stream = torch.tensor(ids[None, :at].astype(np.int64))
            whole = model(stream, candidates_BTW=candidates_NW[None, :at]).logits
        torch.testing.assert_close(logits, whole[0, at - len(piece) :])
        if at == len(ids):
            break
