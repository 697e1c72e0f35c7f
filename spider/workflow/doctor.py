"""Check what a run needs outside of its configuration, before anything is downloaded or trained.

Checks run side by side, in threads, and have a few seconds. A host that does not answer by then is a
warning: only a definite answer is a problem, which stops a run. `examine` makes all checks and imports torch
and mlflow. `obstacles` makes those of files, the hub and the disk for the jobs of a workflow, and imports
neither.
"""

from __future__ import annotations

import os
import platform
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from spider.checkpoints.records import NEWEST
from spider.common.files import read_json
from spider.common.formatting import quantity
from spider.common.results import Results
from spider.config import Config
from spider.data.listing import once
from spider.processes.gpus import bounds
from spider.workflow.start import advice, partitions

#: Seconds that the checks before a workflow may take.
LIMIT = 10.0
#: Bytes on disk for each byte of a source, shards included, by FineWeb-Edu. The least is smaller for the
#: user's own files, which may have columns that nothing reads.
_LIKELY, _LEAST, _LEAST_OWN = 4, 1, 0.25
#: Bytes on disk for each byte of the text of an n-gram index and of its counts, by the default corpus.
_INDEXED = 50

Mark = Literal["ok", "warning", "problem"]
#: Returns a mark and a line, or raises `ValueError` or `OSError` for a problem.
Check = Callable[[], tuple[Mark, str]]
#: Bytes that will be written at least, and in all, for each thing that writes them.
Sizes = dict[str, tuple[float, float]]


class Finding(NamedTuple):
    """The result of a check."""

    subject: str
    mark: Mark
    text: str


def examine(config: Config, profile: Path | None, seconds: float) -> Iterator[Finding]:
    """Yield the findings of all checks: of this machine, or of the cluster of a profile.

    Raises:
        ValueError: a run cannot be described, as `spider.workflow.describe.describe`.
    """
    from spider.tracking.target import quiet
    from spider.workflow.describe import describe

    quiet()
    import_module("mlflow")  # It takes seconds, and the checks have few.
    results = Results(Path(config.results))
    costs = {name: describe(config, name) for name in config.runs}
    sizes = {f"runs.{name}": _written(config, results, cost) for name, cost in costs.items()}
    checks: dict[str, Check] = {"versions": _versions}
    if profile is not None:
        checks["partitions"] = partial(_partitions, profile)
    else:
        needs = {name: cost["memory"] for name, cost in costs.items()}
        checks |= {"GPU": partial(_gpu, config, needs), "memory": partial(_memory, config, needs)}
        checks |= {"jobs at once": _bounds}
    for name in config.datasets:
        checks[f"data {name}"] = partial(_dataset, config, results, name, sizes)
        if config.decontaminated(name):
            checks[f"protected {name}"] = partial(_protected, config, name)
    if absent := _absent(config):
        checks["downloads"] = partial(_published, config, absent, sizes)
    checks["tracking"] = partial(_tracking, config, results.root)
    if config.mirror is not None:
        checks["mirror"] = partial(_mirror, config, results.root)
    yield from _findings(checks, seconds)
    yield from _findings({"disk": partial(_disk, results, sizes)}, seconds)


def obstacles(
    config: Config, root: Path, items: Mapping[str, list[str]], fetched: Sequence[str] = ()
) -> list[str]:
    """Return a line for each problem that stops jobs which read these items of datasets, or download these
    files."""
    sizes: Sizes = {}
    checks = {f"datasets.{name}": partial(_data, config, name, items[name], sizes) for name in items}
    checks |= {f"datasets.{name}.cleaning": partial(_protected, config, name) for name in items}
    checks |= {"downloads": partial(_published, config, fetched, sizes)} if fetched else {}
    found = [*_findings(checks, LIMIT), *_findings({"results": partial(_disk, Results(root), sizes)}, LIMIT)]
    return [f"{one.subject}: {one.text}" for one in found if one.mark == "problem"]


def own_text(config: Config, root: Path, name: str) -> str:
    """Return a line about the user's own files of a dataset, and what is left out; empty if it has none.

    The documents are known once the files are encoded.
    """
    source = config.dataset(name).source
    files = once(file for item in config.parts(name).values() for file in source.own_files(item))
    found = {file: os.stat(file) for file in files if os.path.exists(file)}
    if not found:
        return ""
    size = quantity(sum(one.st_size for one in found.values()), "B")
    counts = f"{len(files):,} file{'s' * (len(files) > 1)}, {size}"
    made = Results(root).shards(name) / "metadata.json"
    with suppress(OSError, ValueError, KeyError):  # Another check reports a damaged file.
        if made.stat().st_mtime >= max(one.st_mtime for one in found.values()):
            documents = sum(split["documents"] for split in read_json(made)["splits"].values())
            counts += f", {documents:,} documents"
    left_out = source.left_out() | {"empty": [file for file, one in found.items() if not one.st_size]}
    reasons = [f"{len(some):,} {why} ({', '.join(some[:3])})" for why, some in left_out.items() if some]
    return f"datasets.{name}: {counts}" + f"; left out: {', '.join(reasons)}" * bool(reasons)


def _findings(checks: Mapping[str, Check], seconds: float) -> Iterator[Finding]:
    """Run checks side by side for these seconds at most, and yield their findings in order."""
    found: dict[str, Finding] = {}

    def run(subject: str, check: Check) -> None:
        try:
            found[subject] = Finding(subject, *check())
        except (ValueError, OSError) as error:
            found[subject] = Finding(subject, "problem", str(error))
        except Exception as error:  # No run stops because a check itself fails.
            found[subject] = Finding(subject, "warning", f"not checked ({type(error).__name__}: {error})")

    threads = {
        subject: threading.Thread(target=run, args=(subject, check), daemon=True)
        for subject, check in checks.items()
    }
    for thread in threads.values():
        thread.start()
    deadline = time.monotonic() + seconds
    for subject, thread in threads.items():
        thread.join(max(0.0, deadline - time.monotonic()))
        late = f"no answer within {seconds:g} s (--seconds); look whether network, disk or driver hang"
        yield found.get(subject) or Finding(subject, "warning", late)


# -------------------------------------------------------------------------------------------------- machine


def _versions() -> tuple[Mark, str]:
    packages = [f"{name} {metadata.version(name)}" for name in ("torch", "snakemake", "mlflow")]
    return "ok", ", ".join([f"Python {platform.python_version()}", *packages])


def _gpu(config: Config, needs: Mapping[str, float]) -> tuple[Mark, str]:
    """Check the number, the precisions and the memory of the GPUs for the runs that request some."""
    import torch

    from spider.processes.device import require_all
    from spider.training.precision import decide, device_name, has_bf16, has_fp8

    require_all(max(run.resources.gpus for run in config.runs.values()))
    if not torch.cuda.is_available():
        return "ok", "none, and no run requests one: they train on the CPU"
    device = torch.device("cuda")
    on_gpu = {name: needs[name] for name, run in config.runs.items() if run.resources.gpus}
    for name in on_gpu:
        decide(config.runs[name].precision, device, None)
    precisions = ["fp32", *["bf16"] * has_bf16(device), *["fp8"] * has_fp8(device)]
    found = f"{torch.cuda.device_count()} x {device_name(device)}, {', '.join(precisions)}"
    return _compared(found, torch.cuda.mem_get_info(device)[0], on_gpu)


def _bounds() -> tuple[Mark, str]:
    """Say what all jobs at once may use of this machine."""
    found = bounds()
    options = " ".join(f"{name}={most}" for name, most in found.items())
    memory = quantity(found["mem_mb"] * 1e6, "B")
    return "ok", f"{found['gpu']} GPUs and {memory}; snakemake --resources {options} sets other bounds"


def _memory(config: Config, needs: Mapping[str, float]) -> tuple[Mark, str]:
    """Compare the memory of this machine with the estimates for runs on the CPU."""
    import psutil
    import torch

    from spider.training.memory import check_fits

    on_cpu = {name: run for name, run in config.runs.items() if not run.resources.gpus}
    for name, run in on_cpu.items():
        for stage in run.stages:
            check_fits(config.stage(name, stage.name), "fp32", torch.device("cpu"))
    whole = {name: needs[name] * run.resources.processes for name, run in on_cpu.items()}
    memory = psutil.virtual_memory()
    return _compared(quantity(memory.total, "B"), memory.available, whole)


def _compared(found: str, free: float, needs: Mapping[str, float]) -> tuple[Mark, str]:
    """Compare free memory with the largest estimate of a run."""
    text = f"{found}, {quantity(free, 'B')} free"
    if needs:
        largest = max(needs, key=needs.__getitem__)
        text += f"; {largest} needs about {quantity(needs[largest], 'B')}"
        if needs[largest] > free:
            return "warning", f"{text}: end other programs, or lower micro_batch or seq_len"
    return "ok", text


def _disk(results: Results, sizes: Sizes) -> tuple[Mark, str]:
    """Compare the free space of the results folder with what the datasets and runs will write there."""
    root = results.root.absolute()
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    if not os.access(existing, os.W_OK):
        return "problem", f"{existing}: cannot be written; make it writable, or name another folder (results)"
    free = shutil.disk_usage(existing).free
    least, likely = (sum(amounts) for amounts in zip((0, 0), *sizes.values(), strict=True))
    has = f"{quantity(free, 'B')} free in {existing}"
    remedy = "free some, or name a folder on another disk (results:)"
    if free < least:
        return "problem", f"{has}, at least {quantity(least, 'B')} will be written; {remedy}"
    if free < likely:
        return "warning", f"{has}, about {quantity(likely, 'B')} may be written; {remedy}"
    return "ok", f"{has}, about {quantity(likely, 'B')} will be written"


def _written(config: Config, results: Results, cost: Mapping[str, Any]) -> tuple[float, float]:
    """Return the least and the likely bytes of the checkpoints and the n-gram index of a run."""
    run = config.runs[cost["run"]]
    shares = run.resources.processes if run.parallel == "fsdp" else 1
    least = likely = 0.0
    for stage in cost["stages"]:
        if not results.stage(cost["run"], stage["stage"]).receipt.exists():
            parts = (stage["memory"].get(part, 0) for part in ("weights", "optimizer", "average"))
            least = max(least, checkpoint := shares * sum(parts))
            # The end is one of those to score; without them there is one more while it is written.
            likely += (NEWEST + max(1, run.evaluation.checkpoints)) * checkpoint
    from spider.data.shards import load_metadata

    shards = results.shards(run.dataset)
    if run.model.ngram and (shards / "metadata.json").exists():
        splits = load_metadata(shards).splits
        likely += _INDEXED * sum(splits[name].tokens for name in ("ngram", "train"))
    return least, likely


# -------------------------------------------------------------------------------------------------- sources


def _dataset(config: Config, results: Results, name: str, sizes: Sizes) -> tuple[Mark, str]:
    """Look at the items of a dataset that are files of the user, or still to be downloaded."""
    source, encoded = config.dataset(name).source, (results.shards(name) / "metadata.json").exists()
    there = {part for part in config.parts(name) if encoded or results.raw(config.raw(name), part).exists()}
    parts = config.parts(name).items()
    items = [item for part, item in parts if source.own_files(item) or part not in there]
    if not items and not source.STREAMED:
        return "ok", f"{source.description}: already there"
    return _data(config, name, items, sizes)


def _data(config: Config, name: str, items: list[str], sizes: Sizes) -> tuple[Mark, str]:
    """Look at the files of these items, or at their hub, and store how much will be written."""
    dataset = config.dataset(name)
    source = dataset.source
    named = [[*source.own_files(item), source.own_tokenizer or ""] for item in items]
    # Downloaded files are looked at by themselves.
    items = [item for item, own in zip(items, named, strict=True) if not any(map(config.download, own))]
    size = source.probe(items, dataset) if items or source.STREAMED else 0
    least = _LEAST_OWN if any(map(source.own_files, items)) else _LEAST
    likely = _LIKELY - dataset.temp  # The raw text is one time the source.
    sizes[f"datasets.{config.raw(name)}"] = (least * size, likely * size)
    amount = f", {quantity(size, 'B')} in {len(items)} parts" if size else ""
    return "ok", f"{source.description}{amount}"


def _absent(config: Config) -> list[str]:
    """Return the files that tasks and datasets name, and that are still to be downloaded."""
    tasks = [task for run in config.runs.values() for task in run.evaluation.tasks.values()]
    found = [file for task in tasks for file in task.files()]
    for source in (dataset.source for dataset in config.datasets.values()):
        found += [
            file for item in source.items() for file in (*source.own_files(item), source.own_tokenizer or "")
        ]
    return [one for one in dict.fromkeys(found) if one and config.download(one) and not Path(one).exists()]


def _published(config: Config, paths: Sequence[str], sizes: Sizes) -> tuple[Mark, str]:
    """Look at files where they are published, and store how much will be written."""
    from spider.data.hub import at, size_of

    size = size_of([at(address) for path in paths if (address := config.download(path))])
    sizes["downloads"] = (size, size)
    return "ok", f"{quantity(size, 'B')} in {len(paths)} files"


def _protected(config: Config, name: str) -> tuple[Mark, str]:
    """Look at the files that the documents of a dataset are compared with."""
    from spider.evaluation.questions import check_protected, protected_files

    check_protected(config, name)
    return "ok", f"{len(protected_files(config, name))} files of tasks and others"


# -------------------------------------------------------------------------------------------------- cluster


def _partitions(profile: Path) -> tuple[Mark, str]:
    """Check the executor of a profile, and that Slurm has the partitions that it names."""
    settings = yaml.safe_load((profile / "config.yaml").read_text(encoding="utf-8"))
    executor = settings.get("executor")
    if executor is None:
        return "problem", f"{profile} names no executor, so jobs run on this machine: leave the profile out"
    if util.find_spec(f"snakemake_executor_plugin_{executor.replace('-', '_')}") is None:
        return "problem", f"the executor {executor} is not installed: pip install -e '.[cluster]'"
    if executor != "slurm":
        return "ok", f"{executor}: its queues are not checked"
    known, file = partitions(), profile / settings["slurm-partition-config"]
    named = yaml.safe_load(file.read_text(encoding="utf-8"))["partitions"]
    if missing := sorted(named.keys() - known):
        return "problem", advice(f"invalid partition specified: {missing[0]}")[0]
    return "ok", f"{', '.join(named)}, as {file} names them"


def _mirror(config: Config, results: Path) -> tuple[Mark, str]:
    """Read what is mirrored. Whether the address takes anything shows at the first job."""
    from spider.workflow.mirror import Mirror

    assert config.mirror is not None
    return "ok", "; ".join(Mirror(config.mirror, results, list(config.runs)).describe())


def _tracking(config: Config, results: Path) -> tuple[Mark, str]:
    """Read from MLflow's store. No store can stop a run, so its errors are warnings."""
    from spider.common.formatting import redact
    from spider.tracking import target
    from spider.tracking.target import reach

    if not target.enabled(config.tracking):
        return "ok", "off"
    uri = ""
    try:
        uri = target.store_uri(results, config.tracking)
        reach(uri)
    except Exception as error:  # Errors of MLflow, requests and SQLAlchemy share no base class.
        reason = redact(target.explain(error, uri))
        return "warning", f"{reason}; the runs go on, and records wait in {results}"
    return "ok", redact(uri)
