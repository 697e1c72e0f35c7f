"""All questions to a GPU, in order of worth, as far as the minutes go.

    python3 benchmarks/gpu/all.py --minutes 9              begin, or go on where the last call ended
    python3 benchmarks/gpu/all.py --minutes 9 --only training
    python3 benchmarks/gpu/all.py --rehearse               tiny sizes on a CPU: does it all run?

Unpacks build/gpu-bundle first, where there is one, so any Python that has torch will do. Every row is kept as
it ends, in one JSON file; a row that is there is not measured again. Exit status: 0 all is there, 75 some is
missing (call again), 1 a row failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import bundle
from questions import MISSING

HERE = Path(__file__).parent
#: A script and the rows that it is asked for, the most worth first. Each is asked for all of them in the end.
ORDER: list[tuple[str, list[str]]] = [
    ("gpt_in_bf16", ["varlen"]),
    ("train_throughput", ["gpt-d12, bf16"]),
    ("train_throughput", ["headline, bf16"]),
    ("kernel_speed", ["spider-1b, *", "patches, *"]),
    ("gpt_in_bf16", ["logits"]),
    ("train_throughput", ["gpt-d12, *"]),
    ("determinism", ["*"]),
    ("gpt_in_bf16", ["greedy"]),
    ("resume", ["*"]),
    ("train_throughput", ["headline, fp8", "headline, bf16, kept"]),
    ("attention", ["*"]),
    ("train_throughput", ["spider-1b*, bf16", "headline, seed"]),
    ("device_memory", ["adamw", "spider-1b-*"]),
    ("fp8_plan", ["*"]),
    ("train_throughput", ["*"]),
    ("kernel_speed", ["*"]),
    ("device_memory", ["*"]),
    ("training", ["*"]),
]
SCRIPTS = tuple(dict.fromkeys(script for script, _ in ORDER))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--minutes", type=float, default=1e6, metavar="N", help="end by then")
    options.add_argument("--json", type=Path, metavar="FILE", help="where figures are kept")
    options.add_argument(
        "--only", nargs="+", choices=SCRIPTS, default=SCRIPTS, metavar="NAME", help=", ".join(SCRIPTS)
    )
    options.add_argument("--rehearse", action="store_true", help="tiny sizes on a CPU: figures mean nothing")
    chosen = options.parse_args()
    deadline = time.monotonic() + 60 * chosen.minutes
    environment = {**os.environ, **bundle.unpack()}
    order = [(script, ["*"]) for script in SCRIPTS] if chosen.rehearse else ORDER
    json_ = chosen.json or bundle.FOLDER / ("rehearsal.json" if chosen.rehearse else "figures.json")
    statuses = {}
    for script, rows in order:
        left = deadline - time.monotonic()
        if script not in chosen.only:
            continue
        if left < 10:
            statuses[script, *rows] = MISSING
            continue
        command = [sys.executable, str(HERE / f"{script}.py"), "--json", str(json_), "--rows", *rows]
        command += ["--minutes", f"{left / 60:.2f}", *(["--rehearse"] if chosen.rehearse else [])]
        statuses[script, *rows] = run(command, environment, left)
    tell(json_, [*statuses.values()])


def run(command: list[str], environment: dict[str, str], seconds: float) -> int:
    """The exit status of a script; one that outlasts its time is killed with all that it started, and is
    missing a row."""
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        print(f"{Path(command[1]).stem}: killed, its time is over; what it has done is kept", flush=True)
        return MISSING
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def tell(path: Path, statuses: list[int]) -> None:
    """How far it came; leaves with the status that says so."""
    questions = json.loads(path.read_text())["questions"] if path.exists() else {}
    failed = [
        f"{name}: {row}" for name, rows in questions.items() for row, of in rows.items() if "error" in of
    ]
    print(f"\n{sum(map(len, questions.values()))} rows in {path}, {len(failed)} of them failed", flush=True)
    for row in failed:
        print(f"    {row}")
    broken = [status for status in statuses if status not in (0, MISSING)]
    if MISSING in statuses:
        print("Some rows are missing: call it again, it goes on from here.")
    sys.exit(1 if failed or broken else MISSING if MISSING in statuses else 0)


if __name__ == "__main__":
    main()
