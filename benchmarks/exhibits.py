"""Show what the README claims: a workflow that is killed three times, and where a score comes from.

    python benchmarks/exhibits.py [--folder FOLDER] [--svg FILE]

The workflow is the smoke preset on the pages of ``docs/``, in three stages with their evaluations. It is done
once undisturbed. In another folder, SIGKILL strikes it and all its jobs while it makes data, after a
checkpoint, and while it writes one. The same command goes on each time. Both final checkpoints, optimizer
state included, must have the same SHA-256, or the exit status is 1.

Then one key is changed, and `snakemake -n` lists the jobs that run again and why. The last lines are the
chain of digests behind the score, which `spider report page` and MLflow show too.

Of the logs of the jobs, only the lines that matter are shown. All takes two minutes of processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from common import PROGRAMS, ROOT
from rich.console import Console
from rich.text import Text
from torture import jobs_of, kill

from spider.common.results import Results
from spider.evaluation.records import Evaluation
from spider.provenance.lineage import Lineage
from spider.report.page import grouped

RUN = "smoke"
LAST = "anneal"
STEP = f"results/runs/smoke/{LAST}/checkpoints/step-00000080"
COMMAND = f"snakemake runs/{RUN}"
#: A kill strikes when a file of this name is there; the second is the moment's description.
KILLS = {
    "shards/*/*/*": "while it made data",
    "runs/smoke/main/checkpoints/step-*30": "after its checkpoint of step 30",
    "runs/smoke/anneal/checkpoints/.step-*80.*.tmp": "while it wrote the last checkpoint",
}
#: Lines of logs that are shown.
SHOWN = re.compile(r"train: [\d,]+ tokens|going on from step|training from step [1-9]|trained to step")
WIDTH = 100


def configuration() -> dict[str, Any]:
    """Return the smoke preset on the pages of ``docs/``."""
    plain = yaml.safe_load((ROOT / "presets/smoke.yaml").read_text())
    text = {"source": {"kind": "local", "files": ["../docs.jsonl"]}, "validation": 0.2}
    plain |= {"results": "results", "datasets": {"docs": text}}
    # Otherwise each of the two runs measures which precision is the fastest.
    plain["runs"][RUN] |= {"data": "docs", "precision": "fp32"}
    return plain


class Workflow:
    """A folder like a checkout, and the commands that are given there."""

    def __init__(self, folder: Path, console: Console) -> None:
        self.folder, self.results, self.console = folder, folder / "results", console
        if not folder.exists():
            folder.mkdir()
            for name in ("Snakefile", "workflow", "rules", "profiles"):
                (folder / name).symlink_to(ROOT / name)
            self.configure(configuration())
        self.shown: set[str] = set()

    def configure(self, plain: dict[str, Any]) -> None:
        (self.folder / "config.yaml").write_text(yaml.safe_dump(plain, sort_keys=False))

    def command(self, line: str, comment: str = "") -> subprocess.Popen[str]:
        """Print a command as it would be typed, and start it."""
        self.console.print(Text.assemble("$ ", (line, "bold"), (f"    # {comment}" * bool(comment), "dim")))
        return subprocess.Popen(
            ["bash", "-c", f"set -o pipefail; {line}"],
            cwd=self.folder,
            env={**os.environ, "PATH": f"{PROGRAMS}:{os.environ['PATH']}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def output(self, line: str, comment: str = "") -> str:
        """Run a command that has to succeed, and return what it prints."""
        process = self.command(line, comment)
        text, _ = process.communicate()
        if process.returncode:
            sys.exit(f"{line}: exit status {process.returncode}\n{text[-4000:]}")
        return text

    def show_logs(self) -> None:
        """Print the lines that jobs have logged since the last call."""
        logs = [path.read_text() for path in sorted(self.results.glob("logs/**/*.log"))]
        found = [line for text in logs for line in text.splitlines() if SHOWN.search(line)]
        new = [line for line in found if line not in self.shown]
        self.shown.update(new)
        for line in sorted(new, key=lambda line: line[:8]):  # by their time
            show(self.console, line)


def kill_it(folder: Path, console: Console) -> bool:
    """Kill a workflow three times, and compare its final checkpoint with that of an undisturbed one."""
    pages = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
    documents = [{"text": section} for page in pages for section in page.split("\n## ")]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "docs.jsonl").write_text("\n".join(map(json.dumps, documents)))
    undisturbed = Workflow(folder / "undisturbed", console)
    undisturbed.output(COMMAND, "undisturbed")
    undisturbed.show_logs()
    killed = Workflow(folder / "killed", console)
    console.print()
    for pattern, moment in KILLS.items():
        process = killed.command(COMMAND, "in another folder" if pattern == next(iter(KILLS)) else "again")
        while process.poll() is None and not any(killed.results.glob(pattern)):
            time.sleep(0.001)
        jobs = ", ".join(" ".join(words[:2]) for *words, _ in jobs_of(process))
        struck = kill(process)
        killed.show_logs()
        if not struck:
            sys.exit(f"the workflow ended before a file {pattern} was seen")
        console.print(f"SIGKILL {moment} ({jobs or 'between two jobs'})", style="bold red", highlight=False)
    killed.output(COMMAND, "again")
    killed.show_logs()
    console.print()
    sums = []
    for one in (undisturbed, killed):
        sums.append(one.output(f"cat {STEP}/*.safetensors | sha256sum", one.folder.name))
        console.print(sums[-1].split()[0], style="bold green", highlight=False)
    equal = sums[0] == sums[1]
    console.print("The bytes are equal." if equal else "THE BYTES DIFFER.", style="bold")
    return equal


def ask_it(folder: Path, console: Console) -> None:
    """Print what a changed key runs again and why, and the chain of digests behind the last score."""
    workflow = Workflow(folder / "undisturbed", console)
    results = Results(workflow.results)
    changed = configuration()
    changed["runs"][RUN]["stages"][1]["lr"] = 2.0e-3
    workflow.configure(changed)
    console.print()
    text = workflow.output(f"snakemake -n --quiet host -- runs/{RUN}", "after lr: 2.0e-3 in the stage main")
    workflow.configure(configuration())
    for rule, reason, stage in re.findall(
        r"^rule (\w+):.*?^ +reason: ([^\n]+?):? *\n^ +wildcards: run=\w+, stage=(\w+)", text, re.M | re.S
    ):
        change = reason.replace("Union of exclusive params before and now across all output: ", "")
        show(console, f"{rule:10}{stage:8}{change}")

    console.print()
    path = results.stage(RUN, LAST).evaluation
    bits = f"{Evaluation.read(path).bpb:.4f} bits per byte of {RUN}/{LAST}"
    console.print(f"Where {bits} come from (spider report page {RUN})")
    lineage = Lineage(results.root)
    for job, *more in grouped(lineage.behind([path.relative_to(results.root).as_posix()]))[::-1]:
        file = job.outputs[0]
        digest = (file.digest or "").removeprefix("sha256:")[:16]
        also = f" and {len(more)} more" if more else ""
        show(console, f"{job.rule:12}{digest:18}{file.path}{also}, commit {(job.commit or 'unknown')[:12]}")


def show(console: Console, line: str) -> None:
    """Print a line, cut at the width of the console."""
    console.print(line.rstrip(), overflow="ellipsis", no_wrap=True, highlight=False)


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--folder", type=Path, help="empty folder for both runs (default: a temporary one)")
    options.add_argument("--svg", type=Path, help="file for a picture of the first exhibit, kill it")
    chosen = options.parse_args()
    console = Console(width=WIDTH, record=True)
    with tempfile.TemporaryDirectory(prefix="exhibits-", ignore_cleanup_errors=True) as scratch:
        folder = (chosen.folder or Path(scratch)).resolve()
        equal = kill_it(folder, console)
        if chosen.svg:
            svg = console.export_svg(title="three times SIGKILL, the same bytes", clear=True)
            # A reader's own monospaced font will do, and a picture loads no font from elsewhere.
            chosen.svg.write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.S))
        ask_it(folder, console)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
