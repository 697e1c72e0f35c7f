"""Helpers shared by the rules: the validated configuration and what each job's inputs are.

Nothing here touches the network, and a job that parses this file again writes nothing.
"""

import atexit
import json
import os
import shlex
import sys
from functools import cache
from pathlib import Path

from snakemake.exceptions import WorkflowError

from spider import requests, tracking
from spider.cluster import lacking_gpus, one_word, packed, remedies, unpacked
from spider.config import CompressConfig, HarnessConfig, load_config
from spider.config.schema import read_yaml
from spider.files import digest
from spider.results import check_root, snapshot, write_config
from spider.unlock import enter


def checked(function, *arguments):
    """Return the function's value; where it raises an error for the user, end Snakemake with that message."""
    try:
        return function(*arguments)
    except ValueError as error:
        sys.exit(f"error: {error}")


IS_MODULE = not workflow.modifier.is_main_snakefile()

# A dry run removes no lock. Neither does a module: the lock is that of the workflow around it.
PRESENCE = None
if workflow.is_main_process:
    PRESENCE = enter(Path.cwd(), change=not (IS_MODULE or workflow.output_settings.dryrun))

# A job that a scheduler started parses this file again, and the configuration file may have been edited by then. So
# the workflow hands its own configuration down in a variable: the path of its snapshot, or the configuration itself
# in a module, whose handlers do not run. Each module of a workflow has a variable of its own.
HANDED_DOWN = "SPIDER_CONFIG"
if IS_MODULE:
    HANDED_DOWN += "_" + digest([workflow.modifier.namespace, workflow.modifier.modify_path("results")])
if not workflow.is_main_process:
    handed = unpacked(os.environ[HANDED_DOWN])
    config = handed if IS_MODULE else checked(read_yaml, Path(handed))

CONFIG = checked(load_config, config)


pathvars:
    results=CONFIG.results,
    logs="<results>/logs",
    benchmarks="<results>/benchmarks",


# A workflow that takes this one as a module may move the results folder, by its `prefix:` or `pathvars:`.
RESULTS = Path(workflow.modifier.modify_path(workflow.pathvars.apply("<results>/spider.json"))).parent
checked(check_root, RESULTS)
if Path(CONFIG.results).is_absolute() and workflow.modifier.modify_path("a") != "a":
    sys.exit(
        f"error: results: {CONFIG.results} is absolute, and a module's `prefix:` cannot move it; "
        "name a relative folder"
    )

# Every job reads this file, `--config` overrides included. Its name is a digest of its text, so it never changes.
SNAPSHOT = snapshot(RESULTS, config)
if workflow.is_main_process:
    os.environ[HANDED_DOWN] = packed(config if IS_MODULE else str(SNAPSHOT))


envvars:
    HANDED_DOWN,


wildcard_constraints:
    dataset="[A-Za-z0-9][A-Za-z0-9_-]*",
    tokenizer="[A-Za-z0-9][A-Za-z0-9_-]*",
    part=r"\d+",
    seq_len=r"\d+",
    run="[A-Za-z0-9][A-Za-z0-9_-]*",
    stage="[A-Za-z0-9][A-Za-z0-9_-]*",
    shape="[0-9a-f]{16}",
    counted="[0-9a-f]{16}",
    text="split|full",


def command(wildcards, output):
    """Return the words that every job begins with: the `spider` beside this interpreter, and its configuration.

    A scheduler sends SIGTERM to all processes of a job. The trap keeps the shell alive until the command, which may
    be saving, has ended. The handlers of a module do not run, so each of its jobs writes the snapshot itself, and a
    job script's interpreter gets a path without spaces here.
    The function takes ``output`` because Snakemake then leaves the param out of its records: the place of a file is
    not a reason to make it again.
    """
    if workflow.non_local_exec:
        try:
            sys.executable = one_word(sys.executable)
        except ValueError as error:
            raise WorkflowError(*str(error).splitlines())
    words = [Path(sys.executable).with_name("spider")]
    if IS_MODULE:
        words += ["--configure", json.dumps({**config, "results": str(RESULTS)})]
    else:
        words += ["--config", SNAPSHOT]
    return f"trap : TERM; {shlex.join(map(str, words))}"


def stages(run):
    return [stage.name for stage in CONFIG.runs[run].stages]


def evaluations(runs):
    """Of each stage of these runs."""
    return [f"<results>/runs/{run}/{stage}/evaluation.json" for run in runs for stage in stages(run)]


def samples(runs):
    """Return what each stage of these runs writes."""
    names = ("sample.json", "sample.txt")
    return [f"<results>/runs/{run}/{stage}/{name}" for run in runs for stage in stages(run) for name in names]


def figures(runs):
    """Return the figures of each stage of these runs."""
    names = ("loss.svg", "inside.svg", "boundaries.html")
    return [f"<results>/runs/{run}/{stage}/{name}" for run in runs for stage in stages(run) for name in names]


def stage_spec(wildcards):
    return CONFIG.stage(wildcards.run, wildcards.stage)


def scoring(wildcards):
    """Return the settings that decide the scores of a stage."""
    return stage_spec(wildcards).evaluation.scoring()


#: Names of the datasets that keep documents for the n-gram index.
WITH_NGRAMS = [name for name, dataset in CONFIG.datasets.items() if dataset.ngram]


@cache
def parts_of(dataset):
    """Return the parts of a dataset by name, each with what it is made from."""
    return checked(CONFIG.parts, dataset)


def watched(files):
    """Return the user's own files as inputs, so that editing one of them runs the job again.

    Snakemake takes braces in a name for a wildcard; in the place of such a file its folder is watched.
    """
    return sorted({local(str(Path(file).parent if "{" in Path(file).name else file)) for file in files})


def there(key, run, files):
    """Return the user's own files that a key of a run names; end Snakemake where one of them is missing.

    Snakemake would name the file but not the key.
    """
    missing = [file for file in files if not Path(file).exists()]
    if missing:
        sys.exit(f"Error: runs.{run}.{key}: {missing[0]}: no such file or folder")
    return files


def raw_identity(wildcards):
    """Return what decides the content of a downloaded or imported part."""
    dataset = CONFIG.datasets[wildcards.dataset]
    return dataset.source.identity(parts_of(wildcards.dataset)[wildcards.part], dataset)


def own_files(wildcards):
    """Return the user's own files that a part is read from."""
    source = CONFIG.datasets[wildcards.dataset].source
    return watched(source.own_files(parts_of(wildcards.dataset)[wildcards.part]))


def part_files(pattern):
    """Return an input function that names one file for each part of a dataset."""
    return lambda wildcards: expand(f"<results>/{pattern}", part=parts_of(wildcards.dataset), **wildcards)


def raw_dataset(dataset):
    """Return the dataset whose downloaded parts a dataset is made from: itself, or the one that it is like."""
    return CONFIG.datasets[dataset].like or dataset


def raw_part(wildcards):
    """Return the file that a part is encoded from. Token ids that others have written are read where they lie."""
    if CONFIG.datasets[wildcards.dataset].source.TOKENS:
        return local(parts_of(wildcards.dataset)[wildcards.part])
    return f"<results>/raw/{raw_dataset(wildcards.dataset)}/{wildcards.part}.parquet"


def raw_records(wildcards):
    """Return the record of each downloaded part of a dataset."""
    if CONFIG.datasets[wildcards.dataset].source.TOKENS:
        return []
    raw = f"<results>/raw/{raw_dataset(wildcards.dataset)}/{{part}}.json"
    return expand(raw, part=parts_of(wildcards.dataset))


def tokenizer_file(wildcards):
    """Return the tokenizer that encodes a dataset, or nothing for bytes."""
    dataset = CONFIG.datasets[wildcards.dataset]
    if dataset.source.own_tokenizer:
        return local(dataset.source.own_tokenizer)
    return f"<results>/tokenizers/{dataset.tokenizer}/tokenizer.json" if dataset.tokenizer else []


def encoding_identity(wildcards):
    """Return what decides the ids of a part."""
    dataset = CONFIG.datasets[wildcards.dataset]
    return dataset.encoding() | dataset.source.encoding(wildcards.part)


def learned_from(wildcards):
    """Return the parts that a tokenizer is learned from."""
    tokenizer = CONFIG.tokenizers[wildcards.tokenizer]
    parts = list(parts_of(tokenizer.data))[: tokenizer.parts]
    return expand(f"<results>/raw/{raw_dataset(tokenizer.data)}/{{part}}.parquet", part=parts)


def tokenizer_identity(wildcards):
    """What is learned, and from which of their documents."""
    tokenizer = CONFIG.tokenizers[wildcards.tokenizer]
    return {**tokenizer.changed(exclude={"data", "parts"}), **CONFIG.datasets[tokenizer.data].held_out()}


def ngram_records(wildcards):
    """Of each part, where there is an n-gram index: else a share that is new would leave finished parts alone, for
    Snakemake compares no params of a job of which an output was never made and none asks for."""
    pattern = "shards/{dataset}/ngram/{part}.json"
    return part_files(pattern)(wildcards) if wildcards.dataset in WITH_NGRAMS else []


def metadata(dataset):
    """Return the index that a stage trains from; a stream has none."""
    index = f"<results>/shards/{dataset}/metadata.json"
    return [] if CONFIG.datasets[dataset].source.STREAMED else index


def reader_of(wildcards):
    """Return a run that reads this n-gram index; it says what to count."""
    runs = (
        run for run, block in CONFIG.runs.items() if block.data == wildcards.dataset and block.model.ngram
    )
    return next(run for run in runs if CONFIG.runs[run].model.ngram.counted == wildcards.counted)


def counted_for(wildcards, output):
    """Return a run that reads this n-gram index, for the command alone.

    The path of the n-gram index holds all that decides its content. A param that takes ``output`` is not recorded,
    so another run that reads the same n-gram index is no reason to count again.
    """
    return reader_of(wildcards)


def from_size(request, name):
    """Return a resource that follows from the size of a job's text, and grows with each attempt."""
    return lambda wildcards, attempt: attempt * getattr(request(wildcards), name)


def counting_of(wildcards):
    """Return what counting a part requests."""
    tokens, _ = size_of(wildcards.dataset, ("ngram", "train"), wildcards.part)
    return requests.counting(tokens, len(CONFIG.runs[reader_of(wildcards)].model.ngram.contexts))


def merging_of(wildcards):
    """Return what merging the counts of all parts requests."""
    splits = ("ngram", "train") if wildcards.text == "full" else ("ngram",)
    tokens, _ = size_of(wildcards.dataset, splits)
    kinds = len(CONFIG.runs[reader_of(wildcards)].model.ngram.contexts)
    return requests.merging(tokens, kinds, threads=2)


def packing_of(wildcards):
    """Return what packing a dataset requests."""
    tokens, documents = size_of(wildcards.dataset, ("train",))
    return requests.packing(tokens, documents, int(wildcards.seq_len))


def size_of(dataset, splits, part=None):
    """Return the tokens and the documents of these splits of a dataset, or of one of its parts.

    Until the dataset is indexed this is an estimate; Snakemake evaluates it again when the job can start.
    """
    index = RESULTS / "shards" / dataset / "metadata.json"
    if not index.exists():
        parts = CONFIG.datasets[dataset].source.parts() if part is None else [part]
        size = sum(estimated_size(dataset, one) for one in parts)
        return size, size / 1000
    indexed = splits_in(index, index.stat().st_mtime_ns)
    shards = [shard for split in splits for shard in indexed.get(split, {"shards": []})["shards"]]
    chosen = [shard for shard in shards if part is None or shard["part"] == part]
    return sum(shard["tokens"] for shard in chosen), sum(shard["documents"] for shard in chosen)


@cache
def splits_in(index, changed):
    """Return the splits that an index describes, read once for each time that it changed."""
    return json.loads(index.read_text())["splits"]


def estimated_size(dataset, part):
    """Estimate the bytes of text in a part that is not encoded: thrice its file's, or a gigabyte without one."""
    file = RESULTS / "raw" / raw_dataset(dataset) / f"{part}.parquet"
    size = CONFIG.datasets[dataset].source.estimated_bytes(parts_of(dataset)[part])
    if file.exists():
        size = max(size, file.stat().st_size)
    return 3 * size if size else 1e9


def indexes(*texts):
    """The indexes that a stage's model reads, if it reads any."""

    def files(wildcards):
        run = CONFIG.runs[wildcards.run]
        folder = f"<results>/ngram/{run.data}/{run.model.ngram.counted}" if run.model.ngram else ""
        return [f"{folder}/{text}/index.json" for text in texts] if folder else []

    return files


def packed_rows(wildcards):
    """The plan of a stage's rows, where they are packed."""
    spec = stage_spec(wildcards)
    packed = f"<results>/shards/{spec.data}/packed-{spec.settings.seq_len}.json"
    return packed if spec.settings.packing == "best_fit" else []


def task_files(wildcards):
    """Return the user's own files that a stage's questions are read from."""
    asked = stage_spec(wildcards).evaluation.tasks
    found = [there(f"evaluation.tasks.{name}", wildcards.run, task.files()) for name, task in asked.items()]
    return watched(path for files in found for path in files)


def harness_results(runs):
    """Of the last stage of those of these runs that are asked standard tasks."""
    asked = [run for run in runs if CONFIG.runs[run].harness]
    return [f"<results>/runs/{run}/{stages(run)[-1]}/harness.json" for run in asked]


def measured(runs):
    """Return all that is measured, written and drawn of these runs."""
    of_stages = evaluations(runs) + samples(runs) + figures(runs)
    of_compressed = compressed(runs, "evaluation.json", "sample.json", "sample.txt")
    return of_stages + of_compressed + harness_results(runs)


def compressed(runs, *names):
    """Return the files of these names beside the compressed last stages of these runs."""
    folders = [
        f"<results>/runs/{run}/{stages(run)[-1]}/compressed" for run in runs if CONFIG.runs[run].compress
    ]
    return [f"{folder}/{name}" for folder in folders for name in names]


def compress_identity(wildcards):
    """How a run is compressed; any stage may be, by naming its file."""
    return (CONFIG.runs[wildcards.run].compress or CompressConfig()).changed()


def harness_asked(wildcards):
    """A run's block; any stage of any run may be asked, by naming the file."""
    return CONFIG.runs[wildcards.run].harness or HarnessConfig()


def harness_files(wildcards):
    """Return the files that the user's own tasks are read from."""
    return watched(there("harness.include", wildcards.run, harness_asked(wildcards).files()))


def harness_options(wildcards):
    """What the command is told."""
    asked = harness_asked(wildcards)
    words = ["--tasks", ",".join(asked.tasks), "--batch", str(asked.batch)]
    for option, value in (("include", asked.include), ("items", asked.items), ("shots", asked.shots)):
        words += [f"--{option}", str(value)] if value is not None else []
    return shlex.join([*words, "--online"] if asked.online else words)


def previous_receipt(wildcards):
    """The receipt of the stage before; the first stage starts from nothing."""
    before = stages(wildcards.run)[: stage_spec(wildcards).index]
    return f"<results>/runs/{wildcards.run}/{before[-1]}/train.json" if before else []


def shown(path, category, what):
    """A file that Snakemake's own report shows as well, with the caption of its name."""
    stage = {"stage": "{stage}"} if "{stage}" in path else {}
    return report(
        f"<results>/{path}",
        caption=f"captions/{Path(path).stem}.rst",
        category=category,
        subcategory="{run}" if stage else None,
        labels={**stage, "what": what},
    )


def job_resource(name):
    """What a run asks for of its `resources:`."""
    return lambda wildcards: getattr(CONFIG.runs[wildcards.run].resources, name)


def all_gpus(wildcards):
    """Return the number of GPUs that a run asks for. A plan says at its end that this machine lacks them."""
    if workflow.dryrun and missing_gpus(wildcards.run) and not SAID:
        SAID.append(wildcards.run)
        atexit.register(print, f"Warning: {missing_gpus(wildcards.run)}", file=sys.stderr)
    return CONFIG.runs[wildcards.run].resources.gpus


def one_gpu(wildcards):
    """Return the number of GPUs of a job that is one process: one, if the run asks for any."""
    return min(1, all_gpus(wildcards))


#: The run of which a plan said that GPUs are missing.
SAID = []


@cache
def missing_gpus(run):
    """Return why this machine cannot give a run its GPUs, or None; the jobs of a scheduler run elsewhere.

    Snakemake has a number of `nodes` where another executor than the local one starts the jobs.
    """
    gpus = CONFIG.runs[run].resources.gpus
    here = workflow.is_main_process and workflow.resource_settings.nodes is None
    return lacking_gpus(gpus) if gpus and here else None


def refuse_missing_gpus():
    """Stop before the first job where jobs that are needed ask for GPUs that this machine lacks."""
    jobs = [job for job in workflow.dag.needrun_jobs() if job.resources.get("gpu")]
    reasons = {missing_gpus(job.wildcards.run) for job in jobs} - {None}
    if reasons:
        raise WorkflowError(*sorted(reasons), "Nothing was started.")


def several_nodes(wildcards):
    """The number of nodes of a training that takes several; else None: a resource that is not set at all."""
    nodes = CONFIG.runs[wildcards.run].resources.nodes
    return nodes if nodes > 1 else None


def longer(minutes):
    """A time limit that grows with each attempt; where a profile caps it, up to there."""
    return lambda wildcards, attempt: attempt * minutes


def finish(status):
    """Close the tracked run of this invocation; after a success, show what was reached."""
    tracking.close_pipeline(RESULTS, os.environ.get("SPIDER_WORKFLOW", ""), status)
    summary = RESULTS / "report/summary.json"
    if status == "finished" and summary.exists():
        from spider.report.terminal import Invocation, terminal_summary

        snakefile, given = Path(workflow.main_snakefile).resolve(), workflow.config_settings
        config = RESULTS.absolute() / "config.yaml"  # one file with all that several files and `--config` say
        if not given.config and len(given.configfiles) < 2:
            config = next(iter(given.configfiles), None)
        started = Invocation(
            config=config,
            snakefile=None if snakefile.parent == Path.cwd().resolve() else snakefile,
            tracked=CONFIG.tracking.enabled,
        )
        terminal_summary(summary, started=started)
