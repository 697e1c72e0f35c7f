"""Test-time training: a prediction depends on earlier ids alone, and the model is restored afterwards."""

import numpy as np
import pytest
import torch

from spider.config import TTTConfig
from spider.evaluation.adapt import adapt
from spider.evaluation.bpb import score
from spider.model.reading import Scoring
from spider.tokens import BYTES
from tests.families.toy.config import Config
from tests.families.toy.model import Toy
from tests.unit.model.small import build
from tests.unit.model.small_gpt import SWITCHES, build_gpt


def stream(*documents: str) -> np.ndarray:
    return np.concatenate([BYTES.encode(d) for d in documents])


TOKENS = stream("The quick brown fox jumps", "", "over the lazy dog, größer than before. " * 3, "the end")
#: Chunks end inside windows, and inside batches of them.
WINDOWS = Scoring(seq_len=16, overlap=0.5, batch=3)
#: Positions near the beginning of a document and the end of a chunk. Only the smallest model tests all.
POSITIONS = (40,)
MORE_POSITIONS = (5, 26, 27, 28, 39, 41, 80, 81, 82)


def toy() -> Toy:
    torch.manual_seed(0)
    model = Toy(Config(family="tests.families.toy", width=8))
    model.reset_parameters()
    return model


def learning(**changes) -> TTTConfig:
    return TTTConfig(**{"chunk": 40, "lr": 0.05, **changes})


MODELS = {
    "spider": build,
    "looped gpt": lambda: build_gpt(**SWITCHES["looped"]),
    "toy": toy,
}


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]()


def test_a_rate_of_zero_gives_the_nats_of_score_exactly(model):
    plain = score(model, TOKENS, WINDOWS)
    nothing = adapt(model, TOKENS, learning(lr=0), WINDOWS)
    assert np.array_equal(nothing.by_target_S, plain.by_target_S) and nothing.nats == plain.nats
    learned = adapt(model, TOKENS, learning(), WINDOWS)
    assert np.array_equal(learned.by_target_S[:25], plain.by_target_S[:25])
    assert learned.bpb < plain.bpb and learned.counts == plain.counts


def test_a_changed_id_changes_no_earlier_prediction(model):
    model, settings = model.double(), learning()
    before = adapt(model, TOKENS, settings, WINDOWS).by_target_S
    for t in POSITIONS + (MORE_POSITIONS if isinstance(model, Toy) else ()):
        changed = TOKENS.copy()
        changed[t] = BYTES.bos if changed[t] != BYTES.bos else ord("Z")
        after = adapt(model, changed, settings, WINDOWS).by_target_S
        assert np.array_equal(after[: t - 1], before[: t - 1]), t
        assert after[t - 1] != before[t - 1]


def test_the_probabilities_of_all_ids_sum_to_one_after_learning():
    """Score each id on its own, just after a chunk was learned: learning may not depend on the predicted
    id."""
    model, settings, ids = toy(), learning(chunk=13), TOKENS[:28]
    assert ids[-1] == BYTES.bos
    streams = np.repeat(ids[None], BYTES.size, axis=0)
    streams[:, -1] = np.arange(BYTES.size)
    nats = [adapt(model, row, settings, Scoring(seq_len=8, batch=2)).by_target_S[-1] for row in streams]
    frozen = [score(model, row, Scoring(seq_len=8, batch=2)).by_target_S[-1] for row in streams]
    assert np.exp(-np.float64(nats)).sum() == pytest.approx(1, abs=1e-5)
    assert not np.allclose(nats, frozen, rtol=1e-3)


def state(model):
    tensors = {n: t.clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}
    flags = [(p.requires_grad, p.grad) for p in model.parameters()], [m.training for m in model.modules()]
    return tensors, flags, torch.get_rng_state()


@pytest.mark.parametrize("way", ["to the end", "stopped", "diverged"])
def test_the_model_is_restored_after_success_interruption_and_divergence(monkeypatch, way):
    model = build().train()
    next(model.parameters()).requires_grad_(False)
    before, learn = state(model), learning(lr=1e30 if way == "diverged" else 0.05)
    if way == "to the end":
        adapt(model, TOKENS, learn, WINDOWS)
    elif way == "stopped":
        left, step = iter([None] * 4), torch.optim.SGD.step
        monkeypatch.setattr(torch.optim.SGD, "step", lambda self: (next(left), step(self)))
        with pytest.raises(StopIteration):
            adapt(model, TOKENS, learn, WINDOWS)
    else:
        with pytest.raises(ValueError, match=r"loss at token \d+ .* not finite: lower evaluation.ttt.lr"):
            adapt(model, TOKENS, learn, WINDOWS)
    after = state(model)
    assert all(torch.equal(tensor, after[0][name]) for name, tensor in before[0].items())
    assert before[1] == after[1] and torch.equal(before[2], after[2])


def test_layers_to_learn_are_the_down_projections_of_a_family():
    model = build()
    names = {id(p): name for name, p in model.named_parameters()}
    of_core = (
        f"core.layers.{i}.ffn.{part}" for i in (0, 1) for part in ("experts.down", "shared.down.weight")
    )
    expected = {"coda.0.ffn.down.weight", "prelude.0.ffn.down.weight", *of_core}
    assert {names[id(p)] for layer in model.ffn_down() for p in layer} == expected
    with pytest.raises(ValueError, match=r"ttt.layers: a model of family .*toy has no feed-forward"):
        adapt(toy(), TOKENS, learning(layers="all"), WINDOWS)


IDS = TOKENS[:66]
#: A window of four chunks, which slides by one chunk.
SLIDING = Scoring(seq_len=16, overlap=0.75, batch=1, carry_over=1)
#: Settings with a chunk of a quarter of a window, by what is learned and when it is forgotten.
SHORT = {
    "next token": learning(chunk=4),
    "next token, reset": learning(chunk=4, reset="window", layers=[1, 3]),
    "projection": learning(chunk=4, objective="projection", layers=[0, 2]),
    "projection, reset": learning(chunk=4, objective="projection", layers="all", reset="window"),
}


def trained_gpt(**changes):
    """Return a GPT in float64 whose output matrices are not zero."""
    model = build_gpt(**changes).double()
    with torch.no_grad():
        for i, matrix in enumerate(p for layer in model.ffn_down() for p in layer):
            matrix.copy_(0.05 * torch.randn(matrix.shape, generator=torch.Generator().manual_seed(i)))
    return model


class Reference:
    """The plainest loop over windows and their chunks, with the update of projections in NumPy."""

    def __init__(self, model, settings: TTTConfig) -> None:
        self.model, self.settings = model, settings
        self.T, self.C, self.M = SLIDING.seq_len, settings.chunk, len(IDS) - 1
        self.ids = torch.from_numpy(IDS.astype(np.int64))
        chosen = settings.layers if isinstance(settings.layers, list) else range(len(model.blocks))
        self.layers = [model.blocks[i].ffn for i in chosen]
        whole = settings.layers is None
        self.learned = list(model.parameters()) if whole else [ffn.down.weight for ffn in self.layers]
        self.original = [p.detach().clone() for p in self.learned]
        self.restore()

    def restore(self) -> None:
        for p, before in zip(self.learned, self.original, strict=True):
            p.data.copy_(before)
        self.momentum = [torch.zeros_like(p) for p in self.learned]

    def nats(self) -> np.ndarray:
        nats: list[float] = []
        if self.settings.reset == "never":
            for start in range(0, self.M, self.C):
                begin = max(0, start + self.C - self.T)
                nats += self.of_chunk(begin, start)
                self.learn(begin, start)
        for begin in range(0, self.M - self.T + self.C, self.C) if self.settings.reset == "window" else ():
            self.restore()
            for start in range(begin, min(begin + self.T, self.M), self.C):
                chunk = self.of_chunk(begin, start)
                nats += chunk if start == len(nats) else []
                self.learn(begin, start)
        self.restore()
        return np.array(nats)

    def of_chunk(self, begin: int, start: int) -> list[float]:
        with torch.no_grad():
            log_p = self.model(self.ids[None, begin : min(begin + self.T, self.M)]).logits[0].log_softmax(-1)
        end = min(start + self.C, self.M)
        return [-float(log_p[t - begin, self.ids[t + 1]]) for t in range(start, end)]

    def learn(self, begin: int, start: int) -> None:
        end = start + self.C
        if end >= self.M:
            return
        if self.settings.objective == "projection":
            h = self.model.ffn_inputs(self.ids[None, begin : begin + self.T], [])[0][0].detach().numpy()
            h = h[start - begin : end - begin]
            for ffn in self.layers:
                up = h @ ffn.up.weight.detach().numpy().T
                z = np.where(up > 0, up, ffn.slope * up) ** 2
                error = z @ ffn.down.weight.detach().numpy().T - h
                ffn.down.weight.data -= self.settings.lr * torch.from_numpy(error.T @ z / self.C)
            return
        log_p = self.model(self.ids[None, begin:end]).logits[0, start - begin :].log_softmax(-1)
        loss = -log_p.gather(-1, self.ids[start + 1 : end + 1, None]).mean()
        found = torch.autograd.grad(loss, self.learned, allow_unused=True)
        gradients = [
            torch.zeros_like(p) if g is None else g for g, p in zip(found, self.learned, strict=True)
        ]
        norm = float(torch.cat([g.flatten() for g in gradients]).norm())
        for p, g, m in zip(self.learned, gradients, self.momentum, strict=True):
            m.mul_(0.9).add_(g * min(1.0, 1.0 / norm))
            p.data -= self.settings.lr * m


@pytest.mark.parametrize("way", SHORT)
def test_short_chunks_give_the_nats_of_the_plainest_loop(way):
    model = trained_gpt()
    adapted = adapt(model, IDS, SHORT[way], SLIDING).by_target_S
    assert len(adapted) == len(IDS) - 1
    np.testing.assert_allclose(adapted, Reference(model, SHORT[way]).nats(), rtol=1e-6)
    frozen = score(model, IDS, SLIDING).by_target_S
    assert np.array_equal(adapted[:4], frozen[:4]) and not (adapted[4:] == frozen[4:]).any()
