"""Write docs/runs.md: what each preset reaches, from finished results.

    python benchmarks/runs.py [RESULTS...] [--text NAME]

A folder of results belongs to the preset whose configuration it has, without a change. The figures of its
runs replace earlier ones of that preset in ``docs/runs.json``, with the digest of the evaluation that they
come from. The page is then written anew: it has a row for each run in that file, and each other preset is
*not run*. So one call adds the rows of a long run on any machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT

from spider.checkpoints.metrics import read_rows
from spider.common.files import digest, read_json, sha256, write_json, write_text
from spider.common.formatting import quantity
from spider.common.results import Results, StageFolder
from spider.config.schema import read_yaml
from spider.provenance.made import jobs, usage
from spider.report.stages import validated
from spider.report.summary import ComparedRun, Line, Summary

PAGE, FIGURES = ROOT / "docs/runs.md", ROOT / "docs/runs.json"
SHARES = (0.25, 0.5, 1.0)
#: What PPMd read first, where it is the bar: the text that the stage was trained on, or else all of it.
GIVEN = ("compressors/ppmd given stage", "compressors/ppmd given all")
BLOCKS = "▁▂▃▄▅▆▇█"
BEGIN = """\
# What to expect of a run

```bash
make run CONFIG=presets/smoke.yaml
python benchmarks/runs.py results/smoke       # writes the rows of these results into this page
```

A row is a run of a preset, trained without a change of its configuration. Bits per byte are of held-out text,
each document alone. Those after a share of the training are read off the curve, which is straight between two
points. Its points are checkpoints scored on the way, or else validations. Both score a part of the text, so
the points of a stage are moved together until they end at its score. The curve is drawn over bytes.

| column | |
|---|---|
| PPMd | its bits per byte, after it read what the last stage was trained on, or else all training text |
| passed | where the curve falls below that |
| time | processor time of the training on a CPU, which other work hardly changes; elapsed time on a GPU |
| memory | the most that a training process held; on a GPU what it held there |
| digest | SHA-256 of the evaluation that the row comes from, and the commit |

A preset that has changed since is marked *as it was*. The times of `fineweb-cpu` and `half-hour-cpu` are up
to 30 s too short, because Snakemake measured them.

| preset, run | device | time | bytes | 25% | 50% | 100% | curve | PPMd | passed | memory | digest |
|---|---|---|---|---|---|---|---|---|---|---|---|
"""


def presets() -> dict[str, Path]:
    """Return the configurations by name, the default one first."""
    files = sorted((ROOT / "presets").glob("*.yaml"))
    return {"config.yaml": ROOT / "config.yaml"} | {path.stem: path for path in files}


def preset_of(results: Path) -> str:
    """Return the preset that a folder of results has the configuration of."""
    own = read_yaml(results / "config.yaml")
    same = [name for name, path in presets().items() if read_yaml(path) == own]
    if not same:
        raise SystemExit(f"{results}: its configuration is none of presets/; run one without a change")
    return same[0]


def curve(folder: StageFolder, stage: Line) -> list[tuple[float, float]]:
    """Return bytes since a stage began, and bits per byte on its text, up to its end."""
    points = [(float(one.bytes), one.bpb) for one in stage.checkpoints]
    is_part = any(one.text_sha256 != stage.text_sha256 for one in stage.checkpoints)
    if not points:
        is_part, first = True, stage.global_step - stage.steps
        rows = [(row.step - first, validated(row.metrics)) for row in read_rows(folder.metrics)]
        points = [(stage.bytes * step / stage.steps, bpb) for step, bpb in rows if step > 0]
    points = [(at, bpb) for at, bpb in points if np.isfinite(bpb)]
    by = stage.bpb - points[-1][1] if points and is_part else 0.0
    return [(at, bpb + by) for at, bpb in points if at < stage.bytes] + [(float(stage.bytes), stage.bpb)]


def figures(results: Results, name: str, run: ComparedRun) -> dict[str, Any]:
    """Return what a run reached, with its curve."""
    trained = [job for job in jobs(results.root) if job.rule == "train" and job.status == "finished"]
    newest = {job.wildcards["stage"]: job for job in trained if job.wildcards["run"] == name}
    points: list[tuple[float, float]] = []
    begin = seconds = memory = 0.0
    on_gpu = run.last.device != "cpu"
    for stage in run.order:
        line, folder, job = run.stages[stage], results.stage(name, stage), newest[stage]
        if line.text_sha256 == run.last.text_sha256:
            points += [(begin + at, bpb) for at, bpb in curve(folder, line)]
        begin += line.bytes
        took = usage(results.root, job)
        held = [took.get("max_rss", 0) * 2**20]
        if on_gpu:
            held = [row.metrics.get("system/gpu_memory_mb", 0) * 1e6 for row in read_rows(folder.metrics)]
        memory = max(memory, *held)
        seconds += line.seconds if on_gpu else took["cpu_time"]
    rates = {one.name: one.value for part in run.last.results.values() for one in part.rows}
    cpu = f"{job.processor}, {job.threads} thread{'s' * (job.threads > 1)}"
    return {
        "run": name,
        "device": run.last.device if on_gpu else cpu,
        "seconds": round(seconds, 1),
        "bytes": int(begin),
        "curve": [(int(at), round(bpb, 4)) for at, bpb in points],
        "ppmd": next((rates[one] for one in GIVEN if rates.get(one)), None),
        "memory": int(memory),
        "digest": sha256(results.stage(name, run.order[-1]).evaluation),
        "commit": job.commit,
    }


def row(one: dict[str, Any], is_current: bool) -> str:
    """Return the row of a run; it says whether the preset has changed since."""
    x_S, y_S = np.array(one["curve"]).T
    asked = [(share, share * one["bytes"]) for share in SHARES]
    at = [f"{np.interp(x, x_S, y_S):.3f}" if x >= x_S[0] else "" for _, x in asked]
    drawn_S = np.interp(np.linspace(x_S[0], x_S[-1], 12), x_S, y_S)
    height_S = (drawn_S - drawn_S.min()) / max(np.ptp(drawn_S), 1e-9) * (len(BLOCKS) - 1)
    spark = "".join(BLOCKS[round(height)] for height in height_S) if len(x_S) > 1 else ""
    ppmd, passed = "", ""
    if one["ppmd"] is not None:
        grid_S = np.linspace(x_S[0], x_S[-1], 10_000)
        below = np.flatnonzero(np.interp(grid_S, x_S, y_S) < one["ppmd"])
        ppmd, passed = f"{one['ppmd']:.3f}", quantity(float(grid_S[below[0]]), "B") if len(below) else "no"
    size, memory = quantity(one["bytes"], "B"), quantity(one["memory"], "B")
    commit, _, dirty = (one["commit"] or "unknown").partition("-")
    came = f"`{one['digest'][:12]}`, `{commit[:8]}{'-dirty' * bool(dirty)}`"
    name = f"`{one['preset']}`{'' if is_current else ' as it was'}, {one['run']}"
    name += f" (on {one['text']})" if one.get("text") else ""
    cells = [name, one["device"], f"{one['seconds']:,.0f} s", size, *at]
    return f"| {' | '.join([*cells, spark, ppmd, passed, memory, came])} |\n"


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("results", nargs="*", type=Path, help="folders of finished results")
    options.add_argument("--text", help="what a server in place of the hub had for the preset's text")
    known = read_json(FIGURES) if FIGURES.exists() else []
    given = options.parse_args()
    for folder in given.results:
        preset = preset_of(folder)
        runs = Summary.read(folder / "report/summary.json").runs
        of = {"preset": preset, "configuration": digest(read_yaml(folder / "config.yaml"))}
        of |= {"text": given.text} if given.text else {}
        new = [of | figures(Results(folder), name, run) for name, run in runs.items()]
        known = [one for one in known if one["preset"] != preset] + new
    write_json(FIGURES, known)
    page = BEGIN
    for preset, path in presets().items():
        now = digest(read_yaml(path))
        own = [row(one, one["configuration"] == now) for one in known if one["preset"] == preset]
        page += "".join(own) or f"| `{preset}` | *not run* |{' |' * 10}\n"
    write_text(PAGE, page)


if __name__ == "__main__":
    main()
