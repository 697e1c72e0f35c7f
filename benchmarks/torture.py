"""Kill a small run a hundred times, break its files, fill its disk: does it end with the same bytes?

    python benchmarks/torture.py [--quick] [--kills N] [--seed N] [--json FILE]

A run of two stages and their evaluations is done once undisturbed. Then it lives again and again in copies of
its folder that hold the data and nothing trained. Each fault of a shuffled deck strikes whatever that life
has to do next, by `spider train`, `spider evaluate` or a whole `snakemake`; the life then goes on by the same
command, as a person or a scheduler would, until both stages are evaluated. A life that ends is compared with
the undisturbed run: every tensor file (weights, optimizer, average), position, losses, gradient norms, scores
and sample. The benchmark goes on until so many SIGKILLs have hit that the last life ends; 1 is its exit
status if any life differed, or a command failed that should not have.

Where a kill fell is read off what it left: the hidden folder of a save bears the dead process's number, and a
manifest in it says that only the rename was missing. Lives take turns on this disk, where a limit on file
sizes stands in for a full one, and, where mounting is allowed, on a memory disk that is really filled.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from common import parser, report

from spider.files import read_json

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
RUN, STAGES = "smoke", ("first", "second")
#: A job that takes so many seconds hangs.
PATIENCE = 600
#: Room on a memory disk when it is not full.
PLENTY = 1 << 30


class Broken(Exception):
    """A command failed though nothing was done to it that it may fail of."""


# ------------------------------------------------------------------------------------------- one run's life


def configuration(steps: int) -> dict[str, Any]:
    """The smoke preset made smaller, on a text made here, in two stages of which the first saves always."""
    config = yaml.safe_load((ROOT / "presets/smoke.yaml").read_text())
    text = {"source": {"kind": "local", "files": ["text.jsonl"]}, "validation": 0.1, "memory": 0.4}
    config |= {"results": "results", "tracking": {"enabled": False}, "datasets": {"text": text}}
    run = config["runs"][RUN]
    run["data"] = "text"
    run["model"]["engram"]["table_size"] = 500
    run["model"]["memory"] = {"orders": [1, 2, 4], "rare": 3, "pointers": [2, 4]}
    run["evaluation"] = {"max_bytes": 4000, "loops_bytes": 500, "sample_bytes": 20}
    run["defaults"] |= {"seq_len": 32, "micro_batch": 4, "max_steps": steps, "ckpt_every": 2, "log_every": 5}
    run["stages"] = [
        {"name": "first", "schedule": "constant", "warmup_steps": 5},
        {"name": "second", "schedule": "linear", "warmup_steps": 0, "ckpt_every": 7, "ema": {"decay": 0.9}},
    ]
    return config


class Life:
    """A folder in which the run is trained and evaluated."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def stage(self, name: str) -> Path:
        return self.folder / "results/runs" / RUN / name

    def checkpoints(self, stage: str) -> list[Path]:
        """Oldest first."""
        return sorted(self.stage(stage).glob("checkpoints/step-*"))

    def log(self, verb: str, stage: str) -> Path:
        """Where the workflow logs that job."""
        return self.folder / "results/logs" / verb / RUN / f"{stage}.log"

    def left(self) -> list[tuple[str, str]]:
        """Jobs still to be done, verb and stage, in order."""
        made = {"train": "train.json", "evaluate": "evaluation.json"}
        jobs = [(verb, stage) for stage in STAGES for verb in made]
        return [(verb, stage) for verb, stage in jobs if not (self.stage(stage) / made[verb]).exists()]

    def begin(self, verb: str, stage: str, **options: Any) -> subprocess.Popen[str]:
        """Start one job as the workflow would."""
        log = self.log(verb, stage)
        log.unlink(missing_ok=True)
        command = [BIN / "spider", "--log", log, verb, RUN, stage, "--threads", "1"]
        return self._start(command, **options)

    def begin_all(self) -> subprocess.Popen[str]:
        """Start the workflow on all that is to be done."""
        if list((self.folder / ".snakemake/locks").glob("*")):
            finish(self._snakemake("--unlock"))
        shutil.rmtree(self.folder / "results/logs", ignore_errors=True)
        return self._snakemake(f"runs/{RUN}")

    def _snakemake(self, target: str) -> subprocess.Popen[str]:
        places = ["--snakefile", ROOT / "Snakefile", "--profile", ROOT / "profiles/default"]
        return self._start([BIN / "snakemake", *places, "--cores", "2", target])

    def _start(self, command: list[Any], **options: Any) -> subprocess.Popen[str]:
        # A limit on file sizes would cut the modules that Python caches, for everybody.
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [str(part) for part in command],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            **options,
        )

    def outcome(self) -> dict[str, Any]:
        """What the run came to, without the times that it took."""
        found = {}
        for stage in STAGES:
            folder = self.stage(stage)
            receipt, evaluation = read_json(folder / "train.json"), read_json(folder / "evaluation.json")
            held = read_json(folder / receipt["checkpoint"] / "manifest.json")["files"]
            rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            curve = ("train/loss", "train/bpb", "train/grad_norm", "train/lr")
            found |= {f"{stage}, {name}": held[name]["sha256"] for name in held if "safetensors" in name}
            for name in ("weights", "averaged_weights", "steps", "bytes", "position", "loss", "best_loss"):
                found[f"{stage}, {name}"] = receipt[name]
            found[f"{stage}, curve"] = [[row["step"], *(row["metrics"][n] for n in curve)] for row in rows]
            for name in ("weights", "nats", "bpb", "bpb_strict", "loops", "figures", "sample"):
                found[f"{stage}, evaluation, {name}"] = evaluation[name]
        return found


def let_end(process: subprocess.Popen[str]) -> str:
    """Let a command end; its output."""
    try:
        return process.communicate(timeout=PATIENCE)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise Broken(f"{process.args}: hangs\n{process.communicate()[0]}") from None


def finish(process: subprocess.Popen[str]) -> None:
    """Let a command end well."""
    output = let_end(process)
    if process.returncode:
        raise Broken(f"{process.args}: exit status {process.returncode}\n{output}")


def kill(process: subprocess.Popen[str]) -> bool:
    """SIGKILL a command and all that it started; False if it had ended, well, before."""
    try:
        started = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, psutil.NoSuchProcess):
        started = []
    output, _ = process.communicate()
    psutil.wait_procs(started)
    if process.returncode not in (0, -signal.SIGKILL):
        raise Broken(f"{process.args}: exit status {process.returncode}\n{output}")
    return process.returncode != 0


# ------------------------------------------------------------------------------------- where a kill has hit


def phase(life: Life, verb: str, stage: str, pid: int) -> str:
    """What the killed process of a job was at, told from what it left."""
    folder = life.stage(stage)
    if verb == "evaluate":
        if (folder / "evaluation.json").exists():
            return "evaluated, leaving"
        log = life.log(verb, stage)
        if not log.exists() or "scoring" not in log.read_text():
            return "starting an evaluation"
        drawn = (folder / "sample.txt").exists()
        return "drawing an evaluation's figures" if drawn else "evaluating"
    card = folder / ".lock.json"
    if not card.exists() or read_json(card)["pid"] != pid:
        return "starting a training"
    if (folder / "train.json").exists():
        return "trained, leaving"
    if saving := list(folder.glob(f"checkpoints/.step-*.{pid}.tmp")):
        whole = (saving[0] / "manifest.json").exists()
        return "checkpoint whole, not yet renamed" if whole else "writing a checkpoint"
    if list(folder.glob(f"checkpoints/.step-*.{pid}.old")):
        return "deleting an old checkpoint"
    if not life.checkpoints(stage):
        return "training, before the first checkpoint"
    final = read_json(life.checkpoints(stage)[-1] / "manifest.json")["final"]
    return "last checkpoint saved, before the receipt" if final else "training, between two saves"


def jobs_of(process: subprocess.Popen[str]) -> list[tuple[str, str, int]]:
    """Verb, stage and process of the jobs that a workflow is running, a training first."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = child.cmdline()
                if len(words) > 1 and Path(words[1]).name == "spider" and RUN in words:
                    at = words.index(RUN)
                    found.append((words[at - 1], words[at + 1], child.pid))
    return sorted(found, key=lambda job: job[0] != "train")


# --------------------------------------------------------------------------------------------------- faults


@dataclass(frozen=True)
class Card:
    """A fault, and the jobs it can strike."""

    name: str
    fault: Callable[[Life, str, str], str | None]
    verbs: tuple[str, ...] = ("train", "evaluate")


class Faults:
    """Ways to disturb a life, at moments drawn from one seed.

    Each strikes one job of a life, and returns where it hit, or None if the job was done before.
    """

    def __init__(self, seed: int, undisturbed: Life, seconds: dict[str, float]) -> None:
        self.draw = random.Random(seed)
        self.seconds = seconds
        sizes = [file.stat().st_size for file in undisturbed.checkpoints(STAGES[-1])[-1].iterdir()]
        self.largest_file, self.checkpoint = max(sizes), sum(sizes)
        self.deck: list[Card] = []

    def strike(self, life: Life, kills: int) -> Iterator[tuple[str, str]]:
        """Disturb a life until it has done all its jobs, or that many SIGKILLs have hit: fault and place."""
        while life.left() and kills > 0:
            verb, stage = life.left()[0]
            card = next((card for card in self.deck if verb in card.verbs), None)
            if card is None:
                self.deck += self._shuffled()
                continue
            self.deck.remove(card)
            where = card.fault(life, verb, stage)
            if where is None:
                self.deck.append(card)
            else:
                kills -= "SIGKILL" in card.name
                yield card.name, where

    def _shuffled(self) -> list[Card]:
        """Ten SIGKILLs and a full disk, in any order."""
        cards = [
            *[Card("SIGKILL while saving", self.kill_saving, ("train",))] * 4,
            *[Card("SIGKILL while working", self.kill_working)] * 2,
            Card("SIGKILL at any moment", self.kill_anywhen),
            Card("SIGKILL of a whole workflow", self.kill_workflow),
            *[Card("SIGKILL, newest checkpoint damaged", self.damage, ("train",))] * 2,
            Card("full disk", self.fill),
        ]
        return self.draw.sample(cards, len(cards))

    def kill_anywhen(self, life: Life, verb: str, stage: str) -> str | None:
        process = life.begin(verb, stage)
        self._let_run(process, 0.7 * self.seconds[verb])
        return phase(life, verb, stage, process.pid) if kill(process) else None

    def kill_working(self, life: Life, verb: str, stage: str) -> str | None:
        """Once it has started what it is for: half of a job's time goes into imports."""
        process = life.begin(verb, stage)
        started = lambda: not phase(life, verb, stage, process.pid).startswith("starting")  # noqa: E731
        if self._wait_for(process, started):
            self._let_run(process, 0.3 * self.seconds[verb])
        return phase(life, verb, stage, process.pid) if kill(process) else None

    def kill_saving(self, life: Life, verb: str, stage: str) -> str | None:
        """When one of the next saves has begun, or is about to be renamed, or up to 30 or 10 ms later."""
        process = life.begin(verb, stage)
        late, skipped = self.draw.random() < 0.5, self.draw.randrange(6)
        seen: set[Path] = set()

        def saving() -> bool:
            hidden = list(life.stage(stage).glob(f"checkpoints/.step-*.{process.pid}.tmp"))
            seen.update(hidden)
            return len(seen) > skipped and any(not late or (h / "manifest.json").exists() for h in hidden)

        if self._wait_for(process, saving):
            time.sleep(self.draw.uniform(0, 0.01 if late else 0.03))
        return phase(life, verb, stage, process.pid) if kill(process) else None

    def kill_workflow(self, life: Life, verb: str, stage: str) -> str | None:
        process = life.begin_all()
        self._let_run(process, 0.4 * self.seconds["workflow"])
        running = jobs_of(process)
        if not kill(process):
            return None
        return phase(life, *running[0]) if running else "workflow, between two jobs"

    def damage(self, life: Life, verb: str, stage: str) -> str | None:
        """Kill a training that has saved; truncate, delete, or flip a bit of a file of its newest save."""
        process = life.begin(verb, stage)
        if self._wait_for(process, lambda: bool(life.checkpoints(stage))):
            self._let_run(process, 0.5)
        if not kill(process):
            return None
        file = self.draw.choice(sorted(life.checkpoints(stage)[-1].iterdir()))
        break_it = self.draw.choice((truncate, flip_a_bit, delete))
        break_it(file, self.draw)
        return f"{break_it.__name__.replace('_', ' ')}: {file.name}"

    def fill(self, life: Life, verb: str, stage: str) -> str | None:
        """Let a job run out of space, wherever that will be."""
        if os.path.ismount(life.folder):
            room = self.draw.uniform(0, 1.1 * self.checkpoint)
            resize(life.folder, shutil.disk_usage(life.folder).used + int(room))
            process = life.begin(verb, stage)
            output = let_end(process)
            resize(life.folder, PLENTY)
        else:
            limit = int(self.draw.uniform(0, self.largest_file))
            bounds = resource.RLIMIT_FSIZE, (limit, limit)
            process = life.begin(verb, stage, preexec_fn=lambda: resource.setrlimit(*bounds))
            output = let_end(process)
        if process.returncode == 0:
            return None
        if process.returncode != 1 or not re.search("no space left|file too large", output, re.I):
            raise Broken(f"{process.args}: exit status {process.returncode} on a full disk\n{output}")
        return "saving a checkpoint" if "saving failed" in output else f"elsewhere, in spider {verb}"

    def _let_run(self, process: subprocess.Popen[str], longest: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(self.draw.uniform(0, longest))

    def _wait_for(self, process: subprocess.Popen[str], condition: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + PATIENCE
        while process.poll() is None:
            if condition():
                return True
            if time.monotonic() > deadline:
                kill(process)
                raise Broken(f"{process.args}: hangs")
            time.sleep(0.001)
        return False


def truncate(file: Path, draw: random.Random) -> None:
    os.truncate(file, draw.randrange(file.stat().st_size))


def flip_a_bit(file: Path, draw: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


def delete(file: Path, draw: random.Random) -> None:
    file.unlink()


# ------------------------------------------------------------------------------------------- lives and ends


def resize(folder: Path, size: int) -> None:
    """Give a memory disk another size."""
    subprocess.run(["mount", "-o", f"remount,size={size}", folder], check=True)


@contextlib.contextmanager
def memory_disk(folder: Path) -> Iterator[bool]:
    """Mount one at ``folder`` while entered; False, and nothing, where that is not allowed."""
    folder.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={PLENTY}", "tmpfs", folder]
    mounted = subprocess.run(mounting, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", folder], check=True)


def undisturbed_life(folder: Path, steps: int) -> tuple[Life, dict[str, float]]:
    """The run left alone, and how long its longest jobs, and all of it, took in seconds."""
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(configuration(steps)))
    with open(folder / "text.jsonl", "w") as file:
        for i in range(200):
            text = f"Document {i} says: " + " ".join(str(i * j % 97) for j in range(60))
            file.write(json.dumps({"id": str(i), "text": text}) + "\n")
    life = Life(folder)
    began = time.monotonic()
    finish(life.begin_all())
    seconds = {"workflow": time.monotonic() - began}
    for verb in ("train", "evaluate"):
        tables = (folder / "results/benchmarks" / verb).rglob("*.tsv")
        seconds[verb] = max(float(table.read_text().splitlines()[1].split("\t")[0]) for table in tables)
    return life, seconds


def untrained_copy(life: Life, folder: Path) -> Life:
    """The folder of a life as it was before its first stage, data and warm-up measured."""
    shutil.copytree(life.folder, folder, dirs_exist_ok=True)
    copy = Life(folder)
    for stage in STAGES:
        shutil.rmtree(copy.stage(stage))
    return copy


def main() -> int:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--kills", type=int, help="SIGKILLs to reach (default: 110; 8 with --quick)")
    options.add_argument("--seed", type=int, default=0, help="of the faults' order and moments")
    chosen = options.parse_args()
    wanted = chosen.kills or (8 if chosen.quick else 110)
    hits: dict[tuple[str, str], list[int]] = {}
    equal: list[bool] = []
    with tempfile.TemporaryDirectory(prefix="torture-") as scratch:
        undisturbed, seconds = undisturbed_life(Path(scratch) / "undisturbed", 30 if chosen.quick else 150)
        expected = undisturbed.outcome()
        faults = Faults(chosen.seed, undisturbed, seconds)
        kills, end = 0, "equal"
        while kills < wanted and not end.startswith("BROKEN"):
            number, folder = len(equal), Path(scratch) / f"life-{len(equal)}"
            with memory_disk(folder) if number % 2 else contextlib.nullcontext():
                try:
                    life = untrained_copy(undisturbed, folder)
                    for name, where in faults.strike(life, wanted - kills):
                        hits.setdefault((name, where), []).append(number)
                        kills += "SIGKILL" in name
                    finish(life.begin_all())
                    found = life.outcome()
                    differs = [key for key in expected if found[key] != expected[key]]
                    end = f"DIFFERS in {'; '.join(differs)}" if differs else "equal"
                except Broken as error:
                    end = f"BROKEN: {error}"
            equal.append(end == "equal")
            print(f"life {number}, {kills} SIGKILLs so far: {end}", file=sys.stderr, flush=True)
    rows = [
        [name, where, str(len(numbers)), str(len(set(numbers))), str(sum(equal[n] for n in set(numbers)))]
        for (name, where), numbers in sorted(hits.items())
    ]
    rows += [["SIGKILLs in all", "", str(kills), str(len(equal)), str(sum(equal))]]
    verdict = "every life ended with the same bytes" if all(equal) else "NOT EVERY LIFE ENDED EQUAL"
    figures = {
        "seed": chosen.seed,
        "kills": kills,
        "hits": [
            {"fault": name, "phase": where, "lives": numbers} for (name, where), numbers in hits.items()
        ],
        "equal": equal,
    }
    columns = ["fault", "what it hit", "times", "lives", "of these equal"]
    report(f"SIGKILLs: {kills}, lives: {len(equal)}; {verdict}", columns, rows, figures, chosen, ["torch"])
    return 0 if all(equal) else 1


if __name__ == "__main__":
    sys.exit(main())
