"""The named choices of the optimizer move the weights as the original descriptions do.

Their equations are written here in NumPy, with their own absolute learning rates, and get the same gradients.
Both sides compute in float64 and use one set of polynomials for the polar factor, that of the description.
"""

import numpy as np
import pytest
import torch

from spider.config import OptimizerConfig, StageSettings
from spider.model import build_model
from spider.model.gpt.config import PRESETS, GPTConfig
from spider.training import optim
from spider.training.optim import build_optimizer
from spider.training.schedule import lr_factor, scheduled

STEPS = 20
SIZES = {"hidden": 64, "layers": 3, "heads": 4, "family": "gpt"}
NANOCHAT = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]
NEWTON_SCHULZ = [(3.4445, -4.7750, 2.0315)] * 5


def polar(g, polynomials, safety):
    """Apply the odd polynomials a x + b x^3 + c x^5 to the singular values of ``g / |g|``."""
    left, values, right = np.linalg.svd(g / (safety * np.linalg.norm(g)), full_matrices=False)
    for a, b, c in polynomials:
        values = a * values + b * values**3 + c * values**5
    return left * values @ right


def adam(state, g, t, lr, beta1, beta2, eps):
    """Return Adam's change of a parameter at step t, counted from 1."""
    state["m"] = beta1 * state.get("m", 0) + (1 - beta1) * g
    state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * g**2
    return -lr * (state["m"] / (1 - beta1**t)) / (np.sqrt(state["v"] / (1 - beta2**t)) + eps)


def nanochat(name, p, state, g, step):
    """Return a parameter after a step of nanochat's optimizer over `STEPS`, the step counted from 0."""
    left = min(1, (STEPS - step) / (0.4 * STEPS))
    scale = (SIZES["hidden"] / 768) ** -0.5
    own = {
        "head": (0.004 * scale, 0.8),
        "embedding": (0.3 * scale, 0.8),
        "values": (0.3 * scale, 0.8),
        "stream": (0.005, 0.8),
        "embedded": (0.5, 0.96),
    }
    for part, (lr, beta1) in own.items():
        if part in name.split("."):
            return p + adam(state, g, step + 1, lr * left, beta1, 0.95, 1e-10)
    warm = min(step / 300, 1)
    mu = 0.85 * (1 - warm) + 0.95 * warm
    state["m"] = mu * state.get("m", 0) + (1 - mu) * g
    u = polar((1 - mu) * g + mu * state["m"], NANOCHAT, 1.02)
    rows, columns = p.shape
    mean = (u**2).mean(1 if rows >= columns else 0, keepdims=True)
    state["v"] = 0.95 * state.get("v", 0) + 0.05 * mean
    even = u / np.sqrt(np.maximum(state["v"], 1e-10))
    even *= np.linalg.norm(u) / np.linalg.norm(even)
    lr = 0.02 * left * max(1, rows / columns) ** 0.5
    return p - lr * even - lr * 0.2 * (1 - step / STEPS) * p * (even * p >= 0)


def golf(name, p, state, g, step):
    """Return a parameter after a step of the golf's original optimizer, with decay over `STEPS`."""
    left = min(1, (STEPS - step) / (0.4 * STEPS))
    if name == "embedding" or p.ndim < 2:
        return p + adam(state, g, step + 1, (0.05 if name == "embedding" else 0.04) * left, 0.9, 0.95, 1e-8)
    g = g + 0.09 * p
    state["m"] = 0.95 * state.get("m", 0) + g
    rows, columns = p.shape
    update = polar(g + 0.95 * state["m"], NEWTON_SCHULZ, 1.0) * max(1, rows / columns) ** 0.5
    return p - 0.04 * left * update


@pytest.mark.parametrize(
    ("preset", "reference", "lr", "block", "polynomials", "safety"),
    [
        ("nanochat", nanochat, 0.004, {}, NANOCHAT, 1.02),
        ("golf", golf, 0.04, PRESETS["golf-seed"], NEWTON_SCHULZ, 1.0),
    ],
)
def test_twenty_steps_are_those_of_the_description(
    preset, reference, lr, block, polynomials, safety, monkeypatch
):
    # `polar` divides its coefficients by the safety factor; the description has done so.
    given = [(a * safety, b * safety**3, c * safety**5) for a, b, c in polynomials]
    monkeypatch.setattr(optim, "POLAR_EXPRESS", given)
    monkeypatch.setattr(optim, "_SAFETY", safety)
    torch.manual_seed(0)
    own = {"kv_heads": 2, "recurrence": {}, "start": "torch"}
    model = build_model(GPTConfig(**{**block, **SIZES, **own})).double()
    config = OptimizerConfig.model_validate(preset)
    settings = StageSettings(
        lr=lr, schedule="wsd", decay_fraction=0.4, warmup_steps=0, min_lr_ratio=0.0, max_steps=STEPS
    )
    optimizer = build_optimizer(model, config, lr, torch.float64)
    assert {t.dtype for name, t in optimizer.tensors(model).items() if not name.endswith(".step")} == {
        torch.float64
    }
    expected = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    states: dict[str, dict] = {name: {} for name in expected}
    rng = np.random.default_rng(0)
    for step in range(STEPS):
        for name, p in model.named_parameters():
            g = rng.normal(size=p.shape) * 10.0 ** rng.normal(size=p.shape[:1] + (1,) * (p.ndim - 1))
            if p.ndim == 2 and len(p) > 256:
                g[rng.random(len(g)) < 0.5] = 0.0  # tokens that the batch lacks
            p.grad = torch.from_numpy(g)
            expected[name] = reference(name, expected[name], states[name], g, step)
        optimizer.set_lr(lr_factor(step, STEPS, settings))
        optimizer.set_scheduled(**scheduled(step, step, STEPS, settings, config))
        optimizer.step()
    kinds = {group["name"] for group in optimizer.param_groups}
    assert {"matrices", "embedding", "x0", "residual"} < kinds
    for name, p in model.named_parameters():
        np.testing.assert_allclose(p.detach().numpy(), expected[name], rtol=0, atol=1e-6, err_msg=name)
