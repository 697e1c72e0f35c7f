"""Kill a small run a hundred times, damage its files and fill its disk, and compare the bytes it ends with.

    python benchmarks/torture.py [--family spider|gpt] [--quick] [--kills N] [--seed N] [--json FILE]

A run of two stages with their evaluations is first done undisturbed. With ``spider`` its model reads an
n-gram index. With ``gpt`` it reads tokens, first text and then conversations in packed rows, and it is
compressed into a file at the end.

Then the run lives again and again in copies of its folder. A copy of the Spider's has the data and no
training. A copy of the GPT's has only the raw text. Each fault of a shuffled deck strikes the next job of
that life: `spider train`, `spider evaluate`, `spider sample`, `spider compress`, or a whole `snakemake`,
which also makes the data. The same command then goes on, as a person or a scheduler would do it, until all is
done.

A life that ends is compared with the undisturbed run: every tensor file (weights, optimizer, average),
position, losses, gradient norms, scores and sample. Every file of tokenizer, shards and packed rows has to be
equal too, and so have the compressed model and its scores. The benchmark ends with the first life that
reaches the wanted number of SIGKILLs. Its exit status is 1 if a life differed or a command failed that should
not have.

The files that a kill leaves show where it fell. The hidden folder of a save, or the hidden file of a job that
makes data, has the number of the dead process in its name. A manifest in the folder of a save means that only
the rename was missing.

Lives take turns on two disks. On this disk a limit on file sizes stands in for a full disk. The other is a
memory disk, if mounting is allowed, and is really filled.
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
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from common import PROGRAMS, ROOT, parser, report

from spider.common.files import read_json, sha256
from spider.common.results import CompressedFolder

RUN, STAGES = "smoke", ("first", "second")
#: Commands of one stage.
_OF_STAGE = ("train", "evaluate", "sample", "compress")
#: Seconds after which a job counts as hanging.
PATIENCE = 600
#: Size of the memory disk in bytes when it is not full.
PLENTY = 1 << 30


class Broken(Exception):
    """A command failed without a fault that explains it."""


# ------------------------------------------------------------------------------------------- one run's life


def configuration(family: str, steps: int) -> dict[str, Any]:
    """Return a smaller smoke preset on the texts of `write_texts`, in two stages; the first saves often."""
    config = yaml.safe_load((ROOT / "presets/smoke.yaml").read_text())
    text = {"source": {"kind": "local", "files": ["text.jsonl"]}, "validation": 0.1}
    config |= {"results": "results", "tracking": {"enabled": False}, "datasets": {"text": text}}
    run = config["runs"][RUN]
    run |= {"data": "text", "evaluation": {"max_bytes": 4000, "loops_bytes": 500, "sample_bytes": 20}}
    run["defaults"] |= {"seq_len": 32, "micro_batch": 4, "max_steps": steps, "ckpt_every": 2, "log_every": 5}
    run["stages"] = [
        {"name": "first", "schedule": "constant", "warmup_steps": 5},
        {"name": "second", "schedule": "linear", "warmup_steps": 0, "ckpt_every": 7, "ema": {"decay": 0.9}},
    ]
    if family == "spider":
        text["ngram"] = 0.4
        run["model"]["engram"]["table_size"] = 500
        run["model"]["ngram"] = {"contexts": [1, 2, 4], "rare": 3, "matches": [2, 4]}
        return config
    run["precision"] = "fp32"  # a warm-up that measures again might choose another precision
    text["tokenizer"] = "bpe"
    config["datasets"]["talk"] = {
        **text,
        "source": {"kind": "local", "files": ["talk.jsonl"]},
        "format": "chat",
        "text_column": "messages",
    }
    config["tokenizers"] = {"bpe": {"data": "text", "vocab_size": 350}}
    run["model"] = {"preset": "gpt-cpu", "hidden": 64, "windows": "SSSL", "short_window": 8}
    run["model"]["value_embeddings"] = "alternate"
    run["evaluation"]["data"] = "talk"
    run["compress"] = {"cap": 1_000_000}
    answers = {"packing": "best_fit", "attend": "document", "learn": "assistant"}
    run["stages"][1] |= {"data": "talk", **answers}
    return config


def write_texts(folder: Path) -> None:
    """Write documents, and conversations about them; most are longer than a row."""
    with open(folder / "text.jsonl", "w") as text, open(folder / "talk.jsonl", "w") as talk:
        for i in range(200):
            content = f"Document {i} says: " + " ".join(str(i * j % 97) for j in range(60))
            text.write(json.dumps({"id": str(i), "text": content}) + "\n")
            messages = [
                {"role": "user", "content": f"What says document {i}?"},
                {"role": "assistant", "content": content[: 20 + i]},
            ]
            talk.write(json.dumps({"id": str(i), "messages": messages}) + "\n")


class Life:
    """A folder with one life of the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results = folder / "results"
        self.compressed = CompressedFolder(self.stage(STAGES[-1]) / "compressed")
        config = yaml.safe_load((folder / "config.yaml").read_text())
        self.compresses = "compress" in config["runs"][RUN]

    def stage(self, name: str) -> Path:
        return self.results / "runs" / RUN / name

    def checkpoints(self, stage: str) -> list[Path]:
        """Return the checkpoints of a stage, oldest first."""
        return sorted(self.stage(stage).glob("checkpoints/step-*"))

    def log(self, command: str, stage: str) -> Path:
        """Return the log of a job."""
        return self.results / "logs" / command / RUN / f"{stage}.log"

    def logged(self, command: str, stage: str, word: str) -> bool:
        """Tell whether a job has logged a word."""
        log = self.log(command, stage)
        return log.exists() and word in log.read_text()

    def prepared(self) -> dict[str, Path]:
        """Return the data and warm-ups by name; all are there before the first stage."""
        patterns = ("tokenizers/**/*.*", "shards/**/*.*", "ngram/**/index.json", f"runs/{RUN}/warmup-*.json")
        files = [path for pattern in patterns for path in self.results.glob(pattern)]
        return {str(path.relative_to(self.results)): path for path in files if path.name[0] != "."}

    def left(self, needed: Set[str]) -> list[tuple[str, str]]:
        """Return command and stage of the jobs that are left, in order.

        While some of the ``needed`` files are missing, making these is the only job.
        """
        if needed - self.prepared().keys():
            return [("prepare", "")]
        outputs = {"train": "train.json", "evaluate": "evaluation.json", "sample": "sample.json"}
        jobs = [
            (command, stage)
            for stage in STAGES
            for command, output in outputs.items()
            if not (self.stage(stage) / output).exists()
        ]
        if self.compresses and not self.compressed.receipt.exists():
            jobs.append(("compress", STAGES[-1]))
        return jobs

    def written(self, pid: int | str = "*") -> set[Path]:
        """Return the hidden files of data and warm-ups that a process has begun to write."""
        folders = ("raw/*", "tokenizers/*", "shards/*", "shards/*/*", f"runs/{RUN}")
        return {path for folder in folders for path in self.results.glob(f"{folder}/.*.{pid}.tmp")}

    def begin(self, command: str, stage: str, **options: Any) -> subprocess.Popen[str]:
        """Start one job as the workflow does."""
        log = self.log(command, stage)
        log.unlink(missing_ok=True)
        words = [PROGRAMS / "spider", "--log", log, command, f"{RUN}/{stage}", "--threads", "1"]
        return self._start(words, **options)

    def begin_all(self) -> subprocess.Popen[str]:
        """Start the workflow for everything that is left."""
        if list((self.folder / ".snakemake/locks").glob("*")):
            finish(self._snakemake("--unlock"))
        shutil.rmtree(self.results / "logs", ignore_errors=True)
        return self._snakemake(f"runs/{RUN}")

    def _snakemake(self, *targets: str) -> subprocess.Popen[str]:
        command = [PROGRAMS / "snakemake", "--snakefile", ROOT / "Snakefile"]
        command += ["--profile", ROOT / "profiles/default", "--cores", "2", *targets]
        return self._start(command)

    def _start(self, words: list[Any], **options: Any) -> subprocess.Popen[str]:
        # Python must not write caches, because a limit on file sizes would cut them for every process.
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [str(word) for word in words],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            **options,
        )

    def outcome(self) -> dict[str, Any]:
        """Return everything that must be equal; times are left out."""
        data = {name: path for name, path in self.prepared().items() if name.startswith(("tok", "shards"))}
        found: dict[str, Any] = {name: sha256(path) for name, path in data.items()}
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
            for name in ("weights", "nats", "bpb", "bpb_strict", "results"):
                found[f"{stage}, evaluation, {name}"] = evaluation[name]
            found[f"{stage}, sample"] = sha256(folder / "sample.json")
        if self.compresses:
            scored = read_json(self.compressed.evaluation)
            found["compressed"] = sha256(self.compressed.model)
            found |= {f"compressed, {name}": scored[name] for name in ("weights", "nats", "bpb")}
            found["compressed, sample"] = sha256(self.compressed.sample)
        return found


def let_end(process: subprocess.Popen[str]) -> str:
    """Wait for a command and return its output."""
    try:
        return process.communicate(timeout=PATIENCE)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise Broken(f"{process.args}: hangs\n{process.communicate()[0]}") from None


def finish(process: subprocess.Popen[str]) -> None:
    """Wait for a command that must succeed."""
    output = let_end(process)
    if process.returncode:
        raise Broken(f"{process.args}: exit status {process.returncode}\n{output}")


def kill(process: subprocess.Popen[str]) -> bool:
    """Kill a command and all that it started; return False if it had already succeeded."""
    try:
        started = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGKILL)
        for child in started:  # that of torchrun has a group of its own
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    except (ProcessLookupError, psutil.NoSuchProcess):
        started = []
    output, _ = process.communicate()
    psutil.wait_procs(started)
    if process.returncode not in (0, -signal.SIGKILL):
        raise Broken(f"{process.args}: exit status {process.returncode}\n{output}")
    return process.returncode != 0


# ------------------------------------------------------------------------------------- where a kill has hit


def phase(life: Life, command: str, stage: str, pid: int) -> str:
    """Return what the killed process of a job was doing, from the files that it left."""
    folder = life.stage(stage)
    if command == "compress":
        if life.compressed.receipt.exists():
            return "compressed, leaving"
        if life.compressed.model.exists():
            return "file written, receipt not"
        return "compressing" if life.logged(command, stage, "windows") else "starting to compress"
    if command == "evaluate":
        if (folder / "evaluation.json").exists():
            return "evaluated, leaving"
        return "evaluating" if life.logged(command, stage, "scoring") else "starting an evaluation"
    if command == "sample":
        if (folder / "sample.json").exists():
            return "sample written, leaving"
        return "writing a sample" if life.logged(command, stage, "writing") else "starting a sample"
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
    """Return command, stage and process of the jobs that a workflow is running, a training first.

    For a job that makes data, the word after its command stands for the stage.
    """
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = child.cmdline()
                if len(words) > 1 and Path(words[1]).name == "spider" and "--log" in words:
                    command, *rest = words[words.index("--log") + 2 :]
                    if command in ("data", "report"):
                        command, *rest = rest
                    stage = rest[0].partition("/")[2] if command in _OF_STAGE else rest[0]
                    found.append((command, stage, child.pid))
    return sorted(found, key=lambda job: job[0] != "train")


def phase_of_workflow(life: Life, running: list[tuple[str, str, int]]) -> str:
    """Return what a killed workflow was doing when these jobs were ``running``."""
    for command, _, pid in running:
        if life.written(pid):
            return f"{command}, writing"
    if not running:
        return "workflow, between two jobs"
    command, stage, pid = running[0]
    return phase(life, command, stage, pid) if command in _OF_STAGE else command


# --------------------------------------------------------------------------------------------------- faults


@dataclass(frozen=True)
class Card:
    """A fault, and the commands that it can strike."""

    name: str
    fault: Callable[[Life, str, str], str | None]
    commands: tuple[str, ...] = _OF_STAGE


class Faults:
    """Ways to disturb a life, at moments drawn from one seed.

    Each strikes one job and returns where it hit, or None if the job was done before.
    """

    def __init__(self, seed: int, undisturbed: Life, seconds: dict[str, float], raw: bool) -> None:
        self.draw = random.Random(seed)
        self.needed, self.seconds, self.raw = undisturbed.prepared().keys(), seconds, raw
        sizes = [file.stat().st_size for file in undisturbed.checkpoints(STAGES[-1])[-1].iterdir()]
        self.largest_file, self.checkpoint = max(sizes), sum(sizes)
        self.deck: list[Card] = []

    def strike(self, life: Life, kills: int) -> Iterator[tuple[str, str]]:
        """Disturb a life until its jobs are done or so many SIGKILLs have hit; yield fault and place."""
        while (left := life.left(self.needed)) and kills > 0:
            command, stage = left[0]
            card = next((card for card in self.deck if command in card.commands), None)
            if card is None:
                self.deck += self._shuffled()
                continue
            self.deck.remove(card)
            where = card.fault(life, command, stage)
            if where is None:
                self.deck.append(card)
            else:
                kills -= "SIGKILL" in card.name
                yield card.name, where

    def _shuffled(self) -> list[Card]:
        """Return ten SIGKILLs and a full disk in any order, and three SIGKILLs while data is made."""
        cards = [
            *[Card("SIGKILL while saving", self.kill_saving, ("train",))] * 4,
            *[Card("SIGKILL while working", self.kill_working)] * 2,
            Card("SIGKILL at any moment", self.kill_anywhen),
            Card("SIGKILL of a whole workflow", self.kill_workflow, ("prepare", *_OF_STAGE)),
            *[Card("SIGKILL, newest checkpoint damaged", self.damage, ("train",))] * 2,
            Card("full disk", self.fill),
        ]
        if self.raw:
            cards += [Card("SIGKILL while making data", self.kill_preparing, ("prepare",))] * 3
        return self.draw.sample(cards, len(cards))

    def kill_anywhen(self, life: Life, command: str, stage: str) -> str | None:
        process = life.begin(command, stage)
        self._let_run(process, 0.7 * self.seconds[command])
        return phase(life, command, stage, process.pid) if kill(process) else None

    def kill_working(self, life: Life, command: str, stage: str) -> str | None:
        """Kill a job after its imports, which take half of its time."""
        process = life.begin(command, stage)
        started = lambda: not phase(life, command, stage, process.pid).startswith("starting")  # noqa: E731
        if self._wait_for(process, started):
            self._let_run(process, 0.3 * self.seconds[command])
        return phase(life, command, stage, process.pid) if kill(process) else None

    def kill_saving(self, life: Life, command: str, stage: str) -> str | None:
        """Kill a training when a later save has begun or is about to be renamed, or a moment later."""
        process = life.begin(command, stage)
        late, skipped = self.draw.random() < 0.5, self.draw.randrange(6)
        seen: set[Path] = set()

        def saving() -> bool:
            hidden = list(life.stage(stage).glob(f"checkpoints/.step-*.{process.pid}.tmp"))
            seen.update(hidden)
            return len(seen) > skipped and any(not late or (h / "manifest.json").exists() for h in hidden)

        if self._wait_for(process, saving):
            time.sleep(self.draw.uniform(0, 0.01 if late else 0.03))
        return phase(life, command, stage, process.pid) if kill(process) else None

    def kill_workflow(self, life: Life, command: str, stage: str) -> str | None:
        process = life.begin_all()
        self._let_run(process, 0.4 * self.seconds["workflow"])
        running = jobs_of(process)
        return phase_of_workflow(life, running) if kill(process) else None

    def kill_preparing(self, life: Life, command: str, stage: str) -> str | None:
        """Kill the workflow when a job has begun to write one of the missing files, or a moment later."""
        seen, missing = life.written(), self.needed - life.prepared().keys()
        enough = len(seen) + self.draw.randint(1, len(missing))
        process = life.begin_all()

        def writing() -> bool:
            seen.update(life.written())
            return len(seen) >= enough or not self.needed - life.prepared().keys()

        if self._wait_for(process, writing):
            time.sleep(self.draw.uniform(0, 0.01))
        running = jobs_of(process)
        return phase_of_workflow(life, running) if kill(process) else None

    def damage(self, life: Life, command: str, stage: str) -> str | None:
        """Kill a training that has saved, and truncate, delete or flip a bit of a file of its newest save."""
        process = life.begin(command, stage)
        if self._wait_for(process, lambda: bool(life.checkpoints(stage))):
            self._let_run(process, 0.5)
        if not kill(process):
            return None
        file = self.draw.choice(sorted(life.checkpoints(stage)[-1].iterdir()))
        break_it = self.draw.choice((truncate, flip_a_bit, delete))
        break_it(file, self.draw)
        return f"{break_it.__name__.replace('_', ' ')}: {file.name}"

    def fill(self, life: Life, command: str, stage: str) -> str | None:
        """Let a job run out of space at any place."""
        if os.path.ismount(life.folder):
            free = self.draw.uniform(0, 1.1 * self.checkpoint)
            resize(life.folder, shutil.disk_usage(life.folder).used + int(free))
            process = life.begin(command, stage)
            output = let_end(process)
            resize(life.folder, PLENTY)
        else:
            limit = int(self.draw.uniform(0, self.largest_file))
            bounds = resource.RLIMIT_FSIZE, (limit, limit)
            process = life.begin(command, stage, preexec_fn=lambda: resource.setrlimit(*bounds))
            output = let_end(process)
        if process.returncode == 0:
            return None
        if process.returncode != 1 or not re.search("no space left|file too large", output, re.I):
            raise Broken(f"{process.args}: exit status {process.returncode} on a full disk\n{output}")
        return "saving a checkpoint" if "saving failed" in output else f"elsewhere, in spider {command}"

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
    """Change the size of a memory disk."""
    subprocess.run(["mount", "-o", f"remount,size={size}", folder], check=True)


@contextlib.contextmanager
def memory_disk(folder: Path) -> Iterator[bool]:
    """Mount a memory disk at ``folder``; yield False if mounting is not allowed."""
    folder.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={PLENTY}", "tmpfs", folder]
    mounted = subprocess.run(mounting, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", folder], check=True)


def undisturbed_life(folder: Path, family: str, steps: int) -> tuple[Life, dict[str, float]]:
    """Run undisturbed; return the life and the seconds of the longest job of each command and of all."""
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(configuration(family, steps)))
    write_texts(folder)
    life = Life(folder)
    began = time.monotonic()
    finish(life.begin_all())
    seconds = {"workflow": time.monotonic() - began}
    for command in _OF_STAGE:
        tables = [*(folder / "results/benchmarks" / command).rglob("*.tsv")]
        took = [float(table.read_text().splitlines()[1].split("\t")[0]) for table in tables]
        seconds |= {command: max(took)} if took else {}
    return life, seconds


def untrained_copy(life: Life, folder: Path, raw: bool) -> Life:
    """Return a copy of a life from before its first stage, or with ``raw`` from before its data was made."""
    ignored = shutil.ignore_patterns("results", ".snakemake") if raw else None
    shutil.copytree(life.folder, folder, ignore=ignored, dirs_exist_ok=True)
    copy = Life(folder)
    if raw:
        return copy
    for stage in STAGES:
        shutil.rmtree(copy.stage(stage))
    return copy


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument(
        "--family", choices=["spider", "gpt"], default="spider", help="family of the run's model"
    )
    arguments.add_argument("--kills", type=int, help="SIGKILLs to reach (default: 110; 8 with --quick)")
    arguments.add_argument("--seed", type=int, default=0, help="seed of the order and moments of faults")
    options = arguments.parse_args()
    wanted = options.kills or (8 if options.quick else 110)
    hits: dict[tuple[str, str], list[int]] = {}
    equal: list[bool] = []
    with tempfile.TemporaryDirectory(prefix="torture-") as scratch:
        undisturbed, seconds = undisturbed_life(
            Path(scratch) / "undisturbed", options.family, 30 if options.quick else 150
        )
        expected = undisturbed.outcome()
        raw = options.family == "gpt"
        faults = Faults(options.seed, undisturbed, seconds, raw)
        kills, end = 0, "equal"
        while kills < wanted and not end.startswith("BROKEN"):
            number, folder = len(equal), Path(scratch) / f"life-{len(equal)}"
            with memory_disk(folder) if number % 2 else contextlib.nullcontext():
                try:
                    life = untrained_copy(undisturbed, folder, raw)
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
        "family": options.family,
        "seed": options.seed,
        "kills": kills,
        "hits": [
            {"fault": name, "phase": where, "lives": numbers} for (name, where), numbers in hits.items()
        ],
        "equal": equal,
    }
    columns = ["fault", "what it hit", "times", "lives", "of these equal"]
    report(f"SIGKILLs: {kills}, lives: {len(equal)}; {verdict}", columns, rows, figures, options, ["torch"])
    return 0 if all(equal) else 1


if __name__ == "__main__":
    sys.exit(main())
