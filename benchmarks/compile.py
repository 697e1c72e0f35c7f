"""Measure how a compiled GPT gives its gradients, and how long it compiles.

Processes that train together exchange a gradient as soon as it is ready, while the backward pass goes on. The
script compiles the same GPT as one graph and layer by layer, each from an empty cache, and runs it eagerly
too. It prints the share of the backward pass's time before the first gradient is ready, the seconds of the
first step, and the number of graphs. Seconds of later steps are a median, on a CPU of the processor's time.

    python benchmarks/compile.py [--quick] [--json FILE] [--layers N] [--threads N]

The seconds of the first step need an idle machine.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
from common import parser, report
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from spider.config.model import family_block, model_block
from spider.model import build_model
from spider.model.interface import Model
from spider.processes.parallel import compile_forward

WAYS = ("eager", "one graph", "layer by layer")
WINDOWS, LENGTH = 4, 256


def measure(way: str, layers: int, steps: int) -> dict[str, Any]:
    """Return the figures of one way."""
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    block = {"preset": "gpt-cpu", "layers": layers, "windows": "SSSL", "short_window": 64}
    model = build_model(family_block(model_block({**block, "value_embeddings": "alternate"}))).train()
    if way == "one graph":
        model.parts_to_compile = lambda: Model.parts_to_compile(model)  # type: ignore[method-assign]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    ids = torch.randint(32, 127, (WINDOWS, LENGTH + 1), device=device)
    ready: list[float] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: ready.append(now(device)))
    shares, seconds, first = [], [], 0.0
    with fresh_cache():
        if way != "eager":
            compile_forward(model)
        for _ in range(steps + 1):
            ready.clear()
            began, wall = now(device), time.perf_counter()
            loss = model(ids[:, :-1], ids[:, 1:]).loss
            backward = now(device)
            loss.backward()
            ended = now(device)
            model.zero_grad()
            shares.append((ready[0] - backward) / (ended - backward))
            seconds.append(ended - began)
            first = first or time.perf_counter() - wall
    figures = {"before_first_gradient": median(shares[1:]), "first_step": first}
    return figures | {"step": median(seconds[1:]), "graphs": counters["stats"]["unique_graphs"]}


def now(device: torch.device) -> float:
    """Return the seconds of the clock after all that is queued on a GPU, or of the processor on a CPU."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--layers", type=int, default=12, help="layers of the GPT")
    arguments.add_argument("--threads", type=int, default=1, help="threads of torch on a CPU")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    layers, steps = (2, 2) if options.quick else (options.layers, 10)
    found = {way: measure(way, layers, steps) for way in WAYS}
    rows = [
        [
            way,
            f"{figures['before_first_gradient']:.1%}",
            f"{figures['first_step']:.1f}",
            f"{figures['step']:.3f}",
            str(figures["graphs"]),
        ]
        for way, figures in found.items()
    ]
    columns = ["way", "before the first gradient", "first step, s", "later step, s", "graphs"]
    report(f"a GPT of {layers} layers", columns, rows, found, options, ["torch"])


if __name__ == "__main__":
    main()
