"""Rows of one call each: how fast host and device are, the tests of ``tests/gpu``, and the warm-up."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from bundle import FOLDER, TREE
from trainings import config_of, spec_of

from spider.common.files import read_json
from spider.training import warmup


def measure(kind: str, **options: Any) -> Iterator[dict[str, Any]]:
    yield {"host": host, "tests": tests, "warm-up": warm_up}[kind](**options)


def host(size: int = 8192) -> dict[str, Any]:
    """Return a turn of a Python loop and a launch, and the rates of a product and of a copy."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    small, a = torch.zeros(64, device=device), torch.ones(size, size, device=device, dtype=torch.bfloat16)
    b = torch.empty(4 * size * size, dtype=torch.int64, device=device)
    began = time.perf_counter()
    for _ in range(10**6):
        pass
    loop = time.perf_counter() - began
    launch, product, copy = timed(lambda: small + small, 3000), timed(lambda: a @ a, 10), timed(b.clone, 10)
    found = {"ns_of_a_turn": 1000 * loop, "us_of_a_launch": 1e6 * launch, "torch": torch.__version__}
    found |= {"tflops": 2e-12 * size**3 / product, "terabytes_per_second": 2e-12 * b.nbytes / copy}
    return {**found, "line": ", ".join(f"{name} {of}" for name, of in found.items())}


def timed(call: Callable[[], Any], count: int) -> float:
    """Return the seconds of a call when many are queued."""
    for last in (3, count):
        began = time.perf_counter()
        for _ in range(last):
            call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


def tests(where: str = "tests/gpu", workers: int = 12) -> dict[str, Any]:
    """Run ``tests/gpu``; the error of the row names the tests that failed.

    compute-sanitizer needs the device alone and is left out.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers), "-p", "no:cacheprovider", where]
    done = subprocess.run([*command, "-k", "not sanitizer"], cwd=TREE, capture_output=True, text=True)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()] or ["no output"]
    failed = [line[:160] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    error = {"error": "; ".join([lines[-1], *failed[:12]])} if done.returncode else {}
    return {"line": lines[-1], "tail": lines[-40:], **error}


def warm_up(what: str, changes: Any = None) -> dict[str, Any]:
    """Return the record of a warm-up with ``precision: auto``: what it chose, and all times."""
    record = FOLDER / "work/warmup.json"
    record.parent.mkdir(parents=True, exist_ok=True)
    warmup.warm_up(spec_of(config_of(what, {"precision": "auto", **(changes or {})})), record)
    row = read_json(record)
    costs = ", ".join(f"{kind} {1000 * of['seconds']:.0f} ms" for kind, of in row["step"].items())
    chosen = f"{len(row['fp8_layers'])} layers in fp8"
    return {**row, "line": f"{row['precision']} in {row['seconds']:.0f} s; a micro-batch: {costs}; {chosen}"}
