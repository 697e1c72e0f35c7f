"""The three choices that make a training step cheap on a CPU, each against what it replaced.

Attention in bf16 written out against torch's SDPA, Muon's polar factor in bf16 against fp32, and whole steps
of the demo's model with and without keeping freed memory (a process each, in turn).

    python benchmarks/cpu_step.py [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from common import arguments, interleaved, report

from spider.model.layers import causal_attention
from spider.training.optim import polar

ROOT = Path(__file__).parents[1]

STEPS = """
import json, sys, time, torch
from pathlib import Path
from spider.config import load_config
from spider.model import build_model
from spider.training.allocator import keep_freed_memory
from spider.training.optim import build_optimizer
if sys.argv[1] == "keep":
    keep_freed_memory()
run = load_config(Path(sys.argv[2]).resolve()).runs["demo"]
torch.manual_seed(0)
model = build_model(run.model).train()
optimizer = build_optimizer(model, run.optimizer, 1e-3, torch.bfloat16)
x = torch.randint(0, 256, (run.defaults.micro_batch, run.defaults.seq_len + 1))
times = []
for _ in range(int(sys.argv[3])):
    began = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x[:, :-1], x[:, 1:], **model.without_knowledge(x[:, :-1])).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    times.append(time.perf_counter() - began)
print(json.dumps(sorted(times[2:])[len(times[2:]) // 2]))
"""


def attention(repeats: int) -> dict[str, float]:
    """Seconds of forward and backward at the demo's shape: 16 windows, 4 heads, 256 positions, width 48."""
    q, k, v = (torch.randn(16, 4, 256, 48, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    upstream = torch.randn(16, 4, 256, 48, dtype=torch.bfloat16)
    ways = {
        "attention, SDPA": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(upstream),
        "attention, written out": lambda: causal_attention(q, k, v).backward(upstream),
    }
    return interleaved(ways, repeats)[0]


def muon(repeats: int) -> dict[str, float]:
    """Seconds of the polar factors of four matrices of the demo's feed-forward."""
    g = torch.randn(4, 1024, 192)
    ways = {"polar factor, fp32": lambda: polar(g), "polar factor, bf16": lambda: polar(g.bfloat16())}
    return interleaved(ways, repeats)[0]


def memory(rounds: int, steps: int) -> dict[str, float]:
    """Median seconds of a whole step, in processes that give freed memory back or keep it."""
    took: dict[str, list[float]] = {"step, freed memory returned": [], "step, freed memory kept": []}
    for _ in range(rounds):
        for name, word in zip(took, ("return", "keep"), strict=True):
            command = [sys.executable, "-c", STEPS, word, str(ROOT / "config.yaml"), str(steps)]
            took[name].append(json.loads(subprocess.run(command, capture_output=True, check=True).stdout))
    return {name: median(values) for name, values in took.items()}


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    rounds, steps = (1, 5) if options.quick else (3, 20)
    rows, figures = [], {}
    for pair in (attention(5 * rounds), muon(5 * rounds), memory(rounds, steps)):
        figures |= pair
        (before, slow), (after, fast) = pair.items()
        rows += [[before, f"{1000 * slow:.1f}", ""], [after, f"{1000 * fast:.1f}", f"{slow / fast:.2f}x"]]
    report("A training step on a CPU", ["what", "ms", "faster"], rows, figures, options, ["torch"])


if __name__ == "__main__":
    main()
