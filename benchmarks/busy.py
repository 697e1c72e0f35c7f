"""A training beside others on the same machine: what it keeps of its speed, by how its threads wait.

The demo's step, alone and beside one and three processes that never pause, each in a session of its own (as
from another terminal). A fair share is the machine's, divided by all who want it: 1/2, and 1/4. libgomp's own
setting lets threads spin at barriers while those they wait for do not run.

    python benchmarks/busy.py [--quick] [--json FILE]
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from common import arguments, report

ROOT = Path(__file__).parents[1]
OTHERS = (0, 1, 3)

STEPS = """
import json, sys, time
from pathlib import Path
from spider.processes.spinning import share_the_processor
share_the_processor()  # which does nothing where the environment says how
import torch
from spider.config import load_config
from spider.model import build_model
from spider.training.optim import build_optimizer
run = load_config(Path(sys.argv[1]).resolve()).runs["demo"]
torch.set_num_threads(2)
torch.manual_seed(0)
model = build_model(run.model).train()
optimizer = build_optimizer(model, run.optimizer, 1e-3, torch.bfloat16)
x = torch.randint(0, 256, (run.defaults.micro_batch, run.defaults.seq_len + 1))
seconds, done, began = float(sys.argv[2]), -2, None
while began is None or time.perf_counter() - began < seconds:
    if done == 0:
        began = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x[:, :-1], x[:, 1:], **model.without_knowledge(x[:, :-1])).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    done += 1
print(json.dumps(done * (x.numel() - len(x)) / (time.perf_counter() - began)))
"""


def settings() -> dict[str, dict[str, str]]:
    """Environments by what they are called; the first leaves it to Spider."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        os.environ.pop(name, None)
    plain = dict(os.environ)
    return {
        "Spider's": plain,
        "libgomp's own": plain | {"GOMP_SPINCOUNT": "300000"},
        "GOMP_SPINCOUNT=2000": plain | {"GOMP_SPINCOUNT": "2000"},
        "OMP_WAIT_POLICY=passive": plain | {"OMP_WAIT_POLICY": "passive"},
    }


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """So many others at work."""
    spin = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(spin, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def main() -> None:
    options = arguments(__doc__ or "")
    rounds, seconds = (1, 3.0) if options.quick else (3, 10.0)
    ways = settings()
    rates: dict[tuple[str, int], list[float]] = {(way, n): [] for way in ways for n in OTHERS}
    for _ in range(rounds):
        for way, environment in ways.items():
            for count in OTHERS:
                command = [sys.executable, "-c", STEPS, str(ROOT / "config.yaml"), str(seconds)]
                with busy(count):
                    done = subprocess.run(command, env=environment, capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(done.stderr)
                rates[way, count].append(json.loads(done.stdout))
                print(f"{way}, {count} others: {rates[way, count][-1]:,.0f} bytes/s", flush=True)
    figures = {way: [median(rates[way, count]) for count in OTHERS] for way in ways}
    alone = figures["libgomp's own"][0]
    rows = [
        [
            way,
            f"{found[0]:,.0f} ({found[0] / alone:.0%} of libgomp's own)",
            *(f"{rate:,.0f} ({rate / (found[0] / (1 + n)):.0%} of a fair share)"
              for n, rate in zip(OTHERS[1:], found[1:], strict=True)),
        ]
        for way, found in figures.items()
    ]  # fmt: skip
    columns = ["threads wait", "alone, bytes/s", "beside one", "beside three"]
    report("A training on a busy machine", columns, rows, figures, options, ["torch"])


if __name__ == "__main__":
    main()
