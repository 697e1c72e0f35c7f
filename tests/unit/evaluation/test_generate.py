"""Test sampling: seeds, limits, the context, and prompts that are refused."""

import re

import numpy as np
import pytest
import torch

from spider.evaluation.generate import Settings, draw, generate, generate_many, stream_text
from spider.model.interface import Model
from spider.tokens import BYTES
from spider.tokens.turns import PYTHON_END, PYTHON_START, TURN
from tests.families.toy.config import Config as ToyConfig
from tests.families.toy.model import Toy
from tests.unit.evaluation.toys import Bigram, Scripted
from tests.unit.model.small import build as build_spider
from tests.unit.model.small_gpt import build_gpt

PAD, BOS, EOS, SIZE = BYTES.pad, BYTES.bos, BYTES.eos, BYTES.size
WRITABLE = np.append(np.flatnonzero(BYTES.bytes_of), EOS)


def test_equal_seeds_write_equal_bytes_for_any_global_random_state():
    def write(seed):
        return list(generate(Bigram(), "a", max_bytes=60, temperature=1.0, seed=seed, context=16))

    first = write(1)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert write(1) == first and torch.equal(torch.get_rng_state(), state)
    assert write(2) != first
    assert all(0 <= i < 256 for i in first)


@pytest.mark.parametrize(("max_bytes", "text"), [(50, b"hello"), (3, b"hel"), (0, b"")])
def test_it_stops_at_eos_which_is_not_written_or_after_max_bytes(max_bytes, text):
    model = Scripted([*b"hello", EOS, *b"never"])
    ids = generate(model, "x", max_bytes=max_bytes, temperature=0.7, seed=0, context=32)
    assert bytes(ids) == text


def drawn(logits_V, count, **settings):
    """Return what is drawn so many times from these logits."""
    generator = torch.Generator().manual_seed(0)
    return draw(logits_V.expand(count, -1), Settings(max_bytes=0, **settings), [generator] * count, WRITABLE)


def test_special_ids_other_than_eos_are_never_drawn():
    logits_V = torch.zeros(SIZE)
    logits_V[PAD] = logits_V[BOS] = 100.0
    logits_V[259:] = 100.0
    assert {EOS} < set(drawn(logits_V, 3000)) <= {*range(256), EOS}


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 9999}, {0, 1, 2, 3}),
        ({"top_p": 0.6}, {0, 1}),  # 0.5 alone does not reach 0.6, so the next id stays
        ({"top_p": 0.01}, {0}),
        ({"top_k": 3, "top_p": 0.85}, {0, 1, 2}),  # after top_k, 0.5 + 0.3 is 0.84 of 0.95
    ],
)
def test_top_k_and_top_p_keep_only_the_head_of_the_distribution(settings, kept):
    logits_V = torch.full((SIZE,), -30.0)
    logits_V[:4] = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    assert set(drawn(logits_V, 400, **settings)) == kept


def test_an_empty_prompt_starts_from_bos_and_a_full_context_continues_with_its_last_half():
    model = Scripted(list(b"abcdefgh"))
    list(generate(model, "", max_bytes=7, temperature=0, seed=0, context=4))
    first = [[BOS], [BOS, *b"a"], [BOS, *b"ab"], [BOS, *b"abc"]]
    assert model.read == [*first, [*b"cd"], [*b"cde"], [*b"cdef"]]


def test_a_prompt_that_is_not_utf8_is_refused_unless_it_is_bytes():
    broken = b"caf\xe9 ol\xff".decode("utf-8", "surrogateescape")  # a command line passes it like this
    with pytest.raises(ValueError, match=r"not valid UTF-8: e9 \(hexadecimal\) after 'caf'.*--prompt-file"):
        generate(Bigram(), broken, max_bytes=1, temperature=0, seed=0)
    assert len(list(generate(Bigram(), b"caf\xe9", max_bytes=2, temperature=0, seed=0))) == 2


def test_stream_text_holds_back_a_character_until_it_is_whole():
    ids = list("a€b".encode())
    assert list(stream_text(ids)) == ["a", "€", "b"]
    assert list(stream_text([BOS, *ids[:3]])) == ["a", "�"]  # cut inside the euro sign
    assert "".join(stream_text([0xFF, 65])) == "�A"


def small(family: str) -> Model:
    """Return a model with weights that are not at their start, in evaluation mode."""
    torch.manual_seed(0)
    model = TINY[family]().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def build_toy() -> Toy:
    model = Toy(ToyConfig(width=8))
    model.reset_parameters()
    return model


TINY = {"toy": build_toy, "gpt": build_gpt, "spider": build_spider}


@pytest.mark.parametrize("family", TINY)
def test_texts_of_one_batch_are_those_of_single_streams(family):
    """The batch begins several contexts, and its texts end at different lengths."""
    model = small(family)
    settings = {"max_bytes": 60, "temperature": 1.5, "top_k": 40, "context": 24, "ends": [TURN]}
    at_once = generate_many(model, "to be", seeds=range(6), **settings)
    alone = [list(generate(model, "to be", seed=seed, **settings)) for seed in range(6)]
    assert [[i for i in ids if i < 256] for ids in at_once] == alone
    assert len({len(ids) for ids in at_once}) > 1
    ended = [ids for ids in at_once if ids[-1] in (EOS, TURN)]
    assert all(len(ids) == 60 for ids in at_once if ids not in ended)


def test_texts_that_are_sampled_at_once_have_calls_of_their_own():
    """The model begins calls, and writes sums of random digits in them."""
    model = Bigram()
    digits = list(b"0123456789")
    with torch.no_grad():
        model.table_VV[:] = -30.0
        model.table_VV[:, PYTHON_START] = 0.0
        model.table_VV[:, TURN] = -1.0
        model.table_VV[[PYTHON_START, ord("+"), *digits]] = -30.0
        model.table_VV[[[PYTHON_START], [ord("+")]], digits] = 0.0
        model.table_VV[digits, ord("+")] = model.table_VV[digits, PYTHON_END] = 0.0
    settings = {"max_bytes": 60, "context": 200, "ends": [TURN], "calculator": True}
    at_once = generate_many(model, "", seeds=range(6), **settings)
    alone = [list(generate(model, "", seed=seed, **settings)) for seed in range(6)]
    assert [[i for i in ids if i != TURN] for ids in at_once] == alone
    calls = re.findall(r"⟨([0-9+]+)⟩⟨= (\d+)⟩", "".join("".join(stream_text(ids)) for ids in alone))
    assert len({sum(map(int, call.split("+"))) for call, _ in calls}) > 3
    assert all(sum(map(int, call.split("+"))) == int(output) for call, output in calls)
