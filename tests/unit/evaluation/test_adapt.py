"""Learning from a text while it is scored: no target knows of itself or of what follows, nothing stays."""

import numpy as np
import pytest
import torch

from spider.config import TTTConfig
from spider.evaluation.adapt import adapt
from spider.evaluation.bpb import score
from spider.model.spider.model import Spider
from spider.tokens import BYTES
from tests.families.toy.config import Config
from tests.families.toy.model import Toy
from tests.unit.model.small import build
from tests.unit.model.small_gpt import SWITCHES, build_gpt


def stream(*documents: str) -> np.ndarray:
    return np.concatenate([BYTES.encode(d) for d in documents])


TOKENS = stream("The quick brown fox jumps", "", "over the lazy dog, größer than before. " * 3, "the end")
#: Chunks end inside windows, and inside batches of them.
WINDOWS = {"seq_len": 16, "overlap": 0.5, "batch": 3}
#: Where a document begins and a chunk ends; for the smallest model also inside and about.
PLACES, MORE = (27, 40, 41), (5, 26, 28, 39, 80, 81, 82)


def toy() -> Toy:
    torch.manual_seed(0)
    model = Toy(Config(family="tests.families.toy", width=8))
    model.reset_parameters()
    return model


def learning(**changes) -> TTTConfig:
    return TTTConfig(**{"chunk": 40, "lr": 0.05, **changes})


MODELS = {
    "spider": build,
    "gpt": build_gpt,
    "looped gpt": lambda: build_gpt(**SWITCHES["looped"]),
    "toy": toy,
}


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]()


#: Where weights go back is the same for every model.
BOTH = [*((name, "never") for name in MODELS), ("gpt", "document"), ("toy", "document")]


@pytest.fixture(params=BOTH, ids=" ".join)
def case(request):
    """A model, and when its weights go back."""
    return MODELS[request.param[0]](), request.param[1]


def test_with_a_rate_of_zero_nats_are_those_of_scoring_to_the_bit(case):
    model, reset = case
    plain = score(model, TOKENS, **WINDOWS)
    nothing = adapt(model, TOKENS, learning(lr=0, reset=reset), **WINDOWS)
    assert np.array_equal(nothing.by_target_S, plain.by_target_S) and nothing.nats == plain.nats
    learned = adapt(model, TOKENS, learning(reset=reset), **WINDOWS)
    assert np.array_equal(learned.by_target_S[:25], plain.by_target_S[:25])
    assert learned.bpb < plain.bpb and learned.counts == plain.counts


def test_the_first_nats_are_the_same_wherever_the_stream_ends(case):
    model, reset = case
    settings = learning(epochs=2, reset=reset)
    whole = adapt(model, TOKENS, settings, **WINDOWS).by_target_S
    for n in (59, 81, 107):
        ended = adapt(model, TOKENS[:n], settings, **WINDOWS).by_target_S
        np.testing.assert_allclose(ended, whole[: n - 1], rtol=1e-6, atol=1e-5)
    model, one = model.double(), {**WINDOWS, "batch": 1}
    whole = adapt(model, TOKENS, settings, **one).by_target_S
    for n in (81, 107):
        assert np.array_equal(adapt(model, TOKENS[:n], settings, **one).by_target_S, whole[: n - 1])


def test_a_changed_id_changes_nothing_before_it(case):
    model, reset = case
    model, settings = model.double(), learning(reset=reset)
    before = adapt(model, TOKENS, settings, **WINDOWS).by_target_S
    for t in PLACES + MORE * isinstance(model, Toy):
        changed = TOKENS.copy()
        changed[t] = BYTES.bos if changed[t] != BYTES.bos else ord("Z")
        after = adapt(model, changed, settings, **WINDOWS).by_target_S
        assert np.array_equal(after[: t - 1], before[: t - 1]), t
        assert after[t - 1] != before[t - 1]


@pytest.mark.parametrize("t", [1, 12, 40])
def test_all_of_a_chunk_is_learned_from_before_the_next_and_not_sooner(t):
    """From its first target to its last, by a model that sees one id and otherwise knows what it learned."""
    model, changed = toy(), TOKENS.copy()
    changed[t] = ord("Z")
    before, after = (adapt(model, ids, learning(), **WINDOWS).by_target_S for ids in (TOKENS, changed))
    assert np.array_equal(before[t + 1 : 40], after[t + 1 : 40]) and not (before[41:80] == after[41:80]).any()


@pytest.mark.parametrize("reset", ["never", "document"])
def test_the_probabilities_of_all_ids_sum_to_one_with_the_weights_that_were_learned(reset):
    """Each asked for on its own, where a document begins and a chunk has just been learned from: neither what
    was learned nor where weights go back depends on the id that is predicted."""
    model, settings, ids = toy(), learning(chunk=13, reset=reset), TOKENS[:28]
    assert ids[-1] == BYTES.bos
    asked = np.repeat(ids[None], BYTES.size, axis=0)
    asked[:, -1] = np.arange(BYTES.size)
    nats = [adapt(model, row, settings, seq_len=8, batch=2).by_target_S[-1] for row in asked]
    frozen = [score(model, row, seq_len=8, batch=2).by_target_S[-1] for row in asked]
    assert np.exp(-np.float64(nats)).sum() == pytest.approx(1, abs=1e-5)
    assert not np.allclose(nats, frozen, rtol=1e-3)


def test_a_chunk_ends_where_it_ends_however_windows_are_batched():
    model = build_gpt()
    one, *others = (adapt(model, TOKENS, learning(), **WINDOWS | {"batch": n}) for n in (1, 2, 5, 100))
    for other in others:
        np.testing.assert_allclose(other.by_target_S, one.by_target_S, rtol=1e-4)


def state(model):
    gradients = [(p.requires_grad, p.grad) for p in model.parameters()]
    tensors = {n: t.clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}
    return tensors, gradients, [m.training for m in model.modules()], torch.get_rng_state()


@pytest.mark.parametrize("way", ["to the end", "stopped", "diverged"])
def test_the_model_is_left_as_it_came_whatever_happens(case, monkeypatch, way):
    model, reset = case
    model.train()
    next(model.parameters()).requires_grad_(False)
    monkeypatch.setattr(Spider, "after_step", lambda *_, **__: pytest.fail("nothing is balanced"))
    before, stop = state(model), learning(reset=reset, lr=1e30 if way == "diverged" else 0.05)
    if way == "to the end":
        adapt(model, TOKENS, stop, **WINDOWS)
    elif way == "stopped":
        left = iter([None] * 4)
        step = torch.optim.SGD.step
        monkeypatch.setattr(torch.optim.SGD, "step", lambda self: (next(left), step(self)))
        with pytest.raises(StopIteration):
            adapt(model, TOKENS, stop, **WINDOWS)
    else:
        with pytest.raises(ValueError, match=r"loss at token \d+ .* not finite: lower evaluation.ttt.lr"):
            adapt(model, TOKENS, stop, **WINDOWS)
    after = state(model)
    assert all(torch.equal(tensor, after[0][name]) for name, tensor in before[0].items())
    assert before[1:3] == after[1:3] and torch.equal(before[3], after[3])


def test_weights_that_were_not_finite_before_are_not_blamed_on_the_rate():
    model = toy()
    with torch.no_grad():
        model.embedding[ord("q")] = float("nan")
    with pytest.raises(ValueError, match="not finite: its weights have diverged"):
        adapt(model, TOKENS, learning(), **WINDOWS)


def test_a_document_that_comes_three_times_costs_less_the_third_time(model):
    text = "It was the best of times, it was the worst of times. "
    tokens, n = stream(text, text, text), len(BYTES.encode(text))
    nats = adapt(model, tokens, learning(chunk=16), **WINDOWS).by_target_S
    first, _, third = np.split(nats, [n - 1, 2 * n - 1])
    assert third.mean() < 0.95 * first.mean()


def test_where_documents_begin_anew_equal_ones_cost_the_same():
    """Of a model that sees one id: what stands before a document does not matter to it."""
    text = "It was the best of times, it was the worst of times. "
    tokens, n, model = stream(text, "another one, " * 5, text), len(BYTES.encode(text)), toy().double()
    anew, on = (adapt(model, tokens, learning(reset=r), **WINDOWS).by_target_S for r in ("document", "never"))
    assert np.array_equal(anew[: n - 1], anew[-n + 1 :]) and not np.array_equal(on[: n - 1], on[-n + 1 :])
    assert not np.array_equal(anew, score(model, tokens, **WINDOWS).by_target_S)


def test_of_the_feed_forwards_only_what_leads_out_of_them_learns(monkeypatch):
    names = {
        "spider": {"coda.0.ffn.down.weight", "prelude.0.ffn.down.weight"}
        | {f"core.layers.{i}.ffn.{part}" for i in (0, 1) for part in ("experts.down", "shared.down.weight")},
        "gpt": {f"blocks.{i}.ffn.down.weight" for i in range(4)},
    }
    step = torch.optim.SGD.step
    for family, expected in names.items():
        model, moved = MODELS[family](), set()
        before = {name: p.clone() for name, p in model.named_parameters()}

        def watched(self, model=model, moved=moved, before=before):
            step(self)
            moved |= {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}

        monkeypatch.setattr(torch.optim.SGD, "step", watched)
        adapt(model, TOKENS, learning(parameters="ffn_down"), **WINDOWS)
        assert moved == expected
    with pytest.raises(
        ValueError, match=r"parameters: ffn_down: a model of family .*toy has no feed-forward"
    ):
        adapt(toy(), TOKENS, learning(parameters="ffn_down"), **WINDOWS)


def test_a_chunk_is_at_least_a_window():
    with pytest.raises(ValueError, match=r"evaluation\.ttt\.chunk: .* the window, 64 \(got 40\)"):
        adapt(toy(), TOKENS, learning(), seq_len=64)


def test_loops_and_precision_are_those_of_the_evaluation(monkeypatch):
    model, seen = build_gpt(**SWITCHES["looped"]), []
    forward = model.forward

    def heard(*args, **given):
        modes = torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), model.training
        seen.append((given["n_loops"], *modes))
        return forward(*args, **given)

    monkeypatch.setattr(model, "forward", heard)
    adapt(model, TOKENS, learning(), **WINDOWS, n_loops=2, autocast=True)
    assert set(seen) == {(2, True, False, False), (2, True, True, False)}
