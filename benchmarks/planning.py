"""Processor time of a dry run, beside that of a plain Snakefile with the same jobs and files.

    python benchmarks/planning.py [--turns 3] [--json FILE]

The plain Snakefile is made from what our dry run prints. It has a rule for each of ours, with the same number
of jobs, inputs and outputs. Each rule has a log, a benchmark, a param and a resource. It reads no
configuration, and computes nothing. Its rules have one wildcard. If inputs do not follow from that, a
function looks them up.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from common import PROGRAMS, ROOT, parser, report

from spider.common.files import write_json

#: A job as it is printed: the files of each kind.
Job = dict[str, list[str]]
RULE = """
rule {name}:
    input: {inputs}
    output: {outputs}
    log: "plain/logs/{name}{mark}.log"
    benchmark: "plain/benchmarks/{name}{mark}.tsv"
    priority: 1
    params: x=1
    resources: mem_mb=1000
    shell: "touch {{output}}"
"""


def runs(number: int) -> dict[str, Any]:
    """Return the smoke preset with so many runs, which differ in their seed."""
    config = yaml.safe_load((ROOT / "presets/smoke.yaml").read_text())
    (run,) = config["runs"].values()
    return config | {"runs": {f"r{seed:03d}": run | {"seed": seed} for seed in range(number)}}


def parts(number: int, cleaning: dict[str, Any] | None) -> dict[str, Any]:
    """Return a dataset of so many parts, which is ``cleaned`` or not."""
    files = [f"data/CC-MAIN-2013-20/train-{part:05d}.parquet" for part in range(number)]
    source = {"kind": "hub", "repo": "HuggingFaceFW/fineweb-edu", "revision": "main", "files": files}
    run = {"data": "web", "model": "tiny", "stages": [{"name": "main", "max_steps": 1}]}
    return {"datasets": {"web": {"source": source, "cleaning": cleaning}}, "runs": {"run": run}}


def jobs_in(printed: str) -> dict[str, list[Job]]:
    """Return the jobs of a dry run by their rule."""
    by_rule = defaultdict[str, list[Job]](list)
    for rule, block in re.findall(r"(?m)^(?:local)?rule (\S+):\n((?:    .*\n)+)", printed):
        lines = dict(line.strip().split(": ", 1) for line in block.splitlines() if ": " in line)
        by_rule[rule].append({kind: _files(lines.get(kind, "")) for kind in ("input", "output")})
    return by_rule


def plain(by_rule: dict[str, list[Job]]) -> str:
    """Return a plain Snakefile with these jobs."""
    rules, tables = [], dict[str, Any]()
    for name, jobs in sorted(by_rule.items(), key=lambda item: item[0] != "all"):
        if name == "all":
            rules.append(f"rule all:\n    input: {', '.join(map(repr, jobs[0]['input']))}\n")
            continue
        values = _different([job["output"][0] for job in jobs]) if len(jobs) > 1 else [""]
        outputs = [
            _pattern([job["output"][at] for job in jobs], values) for at in range(len(jobs[0]["output"]))
        ]
        assert None not in outputs, name
        inputs = None
        if len({len(job["input"]) for job in jobs}) == 1:
            inputs = [
                _pattern([job["input"][at] for job in jobs], values) for at in range(len(jobs[0]["input"]))
            ]
        if inputs is None or None in inputs:
            tables[name] = {value: job["input"] for value, job in zip(values, jobs, strict=True)}
            inputs_text = f"lambda wildcards: TABLES[{name!r}][wildcards.w]"
        else:
            inputs_text = ", ".join(map(repr, inputs))
        mark = "-{w}" if len(jobs) > 1 else ""
        outputs_text = ", ".join(map(repr, outputs))
        rules.append(RULE.format(name=name, inputs=inputs_text, outputs=outputs_text, mark=mark))
    return f"TABLES = {tables!r}\nwildcard_constraints: w='.+'\n" + "".join(rules)


def _different(files: Sequence[str]) -> list[str]:
    """Return the part of each path that is not the same in all of them, from one slash or dot to another."""
    begin = len(os.path.commonpath(files)) + 1
    rest = [re.split(r"(?<=[/.])", file[begin:]) for file in files]
    end = next(n for n in range(1, 99) if len({tuple(one[-n:]) for one in rest}) > 1) - 1
    return ["".join(one[: len(one) - end]).rstrip("/.") for one in rest]


def _files(listed: str) -> list[str]:
    return [file.split(" ")[0] for file in listed.split(", ") if file]


def _pattern(files: Sequence[str], values: Sequence[str]) -> str | None:
    """Return the pattern of one file of each job, or None if it does not follow from the wildcard."""
    if len(files) == 1:
        return files[0]  # a rule without a wildcard
    found = files[0].replace(values[0], "{w}")
    return found if [found.replace("{w}", value) for value in values] == list(files) else None


def seconds(snakefile: Path, folder: Path, *options: str | Path) -> tuple[float, str]:
    """Return the processor seconds of a dry run, and what it prints."""
    command = [PROGRAMS / "snakemake", "--snakefile", snakefile, "--dry-run", "--cores", "2", *options]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--turns", type=int, default=3)
    options = options.parse_args()
    near = {"exact": True, "near": 0.8}
    index = "shards/web/metadata.json"
    cases = [
        ("100 runs", runs(2 if options.quick else 100), None),
        ("1,000 parts", parts(3 if options.quick else 1000, None), index),
        ("1,000 parts with cleaning", parts(3 if options.quick else 1000, near), index),
    ]
    if not options.quick:
        cases.append(("2,410 parts with cleaning", parts(2410, near), index))
    rows, figures = [], {}
    for title, config, target in cases:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made).resolve()
            write_json(folder / "config.json", config | {"results": str(folder / "results")})
            ours = ["--configfile", folder / "config.json", "--profile", ROOT / "profiles/default"]
            ours += ["--", folder / "results" / target] if target else []
            _, printed = seconds(ROOT / "Snakefile", folder, "--quiet", "progress", *ours)
            by_rule = jobs_in(printed)
            (folder / "plain.smk").write_text(plain(by_rule))
            theirs = ["--profile", "none", *(["--", str(folder / "results" / target)] if target else [])]
            took = [
                (
                    seconds(ROOT / "Snakefile", folder, "--quiet", "all", *ours)[0],
                    seconds(folder / "plain.smk", folder, "--quiet", "all", *theirs)[0],
                )
                for _ in range(1 if options.quick else options.turns)
            ]
            jobs = sum(map(len, by_rule.values()))
            ratio = median(a / b for a, b in took)
            one, other = (median(each) for each in zip(*took, strict=True))
            rows.append([title, f"{jobs:,}", f"{one:.1f}", f"{other:.1f}", f"{ratio:.2f}"])
            print(rows[-1], flush=True)
            figures[title] = {"jobs": jobs, "seconds": took, "ratio": ratio}
    report(
        "Processor seconds of a dry run",
        ["", "jobs", "Spider", "plain Snakefile", "ratio"],
        rows,
        figures,
        options,
        ["snakemake"],
    )


if __name__ == "__main__":
    main()
