"""The configuration of the workflow, and what the rules derive from it: inputs, params and resources of jobs.

Parsing this file uses no network, and a job that parses it again writes nothing. Snakemake documents no interface
for these attributes of `workflow`: `is_main_process` and `non_local_exec` (jobs parse this file again), `modifier`
and `pathvars.apply` (the names and paths of a module), `output_settings` and `resource_settings` (a dry run,
another executor), `global_resources` and `register_resource` (bounds), `dag.jobs` and `dag.needrun_jobs` (warnings,
and refusing before the first job), `dag.forcefiles` (`strict_code`), `persistence` (records of jobs),
`main_snakefile` and `config_settings` (the commands in the terminal summary). The tests of the workflow
cover each of them.
"""

import atexit
import json
import os
import shlex
import sys
from functools import cache, partial
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.io import contains_wildcard, flag

from spider.common import extras

from spider import progress
from spider.common.cluster import lacking_gpus, one_word, packed, remedies, unpacked
from spider.config import CompressConfig, HarnessConfig, load_config
from spider.config.schema import read_yaml
from spider.config.scored import baselines_name, learned_splits, overlap_name, stage_with
from spider.doctor import obstacles, own_text
from spider.evaluation import protected
from spider.common.files import digest
from spider.processes.gpus import bounds
from spider.provenance.made import STANDS_FOR, in_future, real
from spider.provenance.recorder import Recorder
from spider.provenance.lineage import by_rule, other_code
from spider.config.requests import Requests
from spider.common.results import check_root, snapshot, write_config
from spider.tracking.follower import Follower
from spider.tracking.target import enabled
from spider.unlock import enter


def checked(function, *arguments):
    """Return the value of a function. After an error for the user, end Snakemake with its message."""
    try:
        return function(*arguments)
    except ValueError as error:
        sys.exit(f"error: {error}")


IS_MODULE = not workflow.modifier.is_main_snakefile()
IS_DRY_RUN = workflow.output_settings.dryrun

# A scheduler's job parses this file again, and the user may have edited the configuration by then. So the main
# process hands its configuration down in a variable: the path of its snapshot, or in a module, whose handlers do
# not run, the configuration itself. Each module has a variable of its own.
HANDED_DOWN = "SPIDER_CONFIG"
if IS_MODULE:
    HANDED_DOWN += "_" + digest([workflow.modifier.namespace, workflow.modifier.modify_path("results")])
if not workflow.is_main_process:
    handed = unpacked(os.environ[HANDED_DOWN])
    config = handed if IS_MODULE else checked(read_yaml, Path(handed))

# Snakemake takes the last of two equal keys.
for file in workflow.configfiles if workflow.is_main_process else ():
    checked(read_yaml, Path(file))

CONFIG = checked(load_config, config)


pathvars:
    results=CONFIG.results,
    logs="<results>/logs",
    benchmarks="<results>/benchmarks",


# The workflow around a module may move the results folder by `prefix:` or `pathvars:`.
RESULTS = Path(workflow.modifier.modify_path(workflow.pathvars.apply("<results>/spider.json"))).parent
checked(check_root, RESULTS)
if Path(CONFIG.results).is_absolute() and workflow.modifier.modify_path("a") != "a":
    sys.exit(
        f"error: results: {CONFIG.results} is absolute, and a module's `prefix:` cannot move it; "
        "name a relative folder"
    )

# Every job reads this file, which includes `--config` overrides. Its name is a digest of its text.
SNAPSHOT = snapshot(RESULTS, config)
# Open until the process ends.
ENTERED = checked(enter, Path.cwd(), RESULTS) if workflow.is_main_process and not IS_DRY_RUN else None
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
    compressed="(/compressed)?",
    shape="[0-9a-f]{16}",
    counted="[0-9a-f]{16}",
    text="split|full",
    scored="[0-9a-f]{16}",


# In a module the configuration is not written before the first job.
CONFIGURED = (
    ["--configure", json.dumps({**config, "results": str(RESULTS)})] if IS_MODULE else ["--config", SNAPSHOT]
)


def command(wildcards, output):
    """Return the words that begin every job: `spider` of this environment, and the configuration.

    A scheduler sends SIGTERM to all processes of a job. The trap keeps the shell alive until the command ends,
    which may save a checkpoint first. The handlers of a module do not run, so each of its jobs writes the snapshot.
    Snakemake does not record a param whose function takes ``output``: a moved folder is no reason to run a job
    again.
    """
    if workflow.non_local_exec:
        # The script of a scheduler's job names the interpreter without quotes.
        try:
            sys.executable = one_word(sys.executable)
        except ValueError as error:
            raise WorkflowError(*str(error).splitlines())
    words = [Path(sys.executable).with_name("spider"), *CONFIGURED]
    return f"trap : TERM; {shlex.join(map(str, words))}"


# ------------------------------------------------------------------------------------------------- resources

REQUESTS = Requests(CONFIG, RESULTS)
RESOURCES = {name: run.resources.model_dump() for name, run in CONFIG.runs.items()}
# A foreign model has the resources of the run that it is scored like.
RESOURCES |= {name: RESOURCES[CONFIG.scored_like(one).run] for name, one in CONFIG.foreign.items()}


# Jobs of another executor run elsewhere. Snakemake has a number of `nodes` there.
HERE = workflow.is_main_process and workflow.resource_settings.nodes is None


def bound_resources():
    """Bound the GPUs and the memory of all jobs at once by those of this machine, where the user sets no bound."""
    own = {name: most for name, most in bounds().items() if most and name not in workflow.global_resources}
    for name, most in own.items():
        workflow.register_resource(name, most)
    if own and IS_DRY_RUN:
        listed = " ".join(f"{name}={most}" for name, most in own.items())
        atexit.register(
            print, f"All jobs at once use at most {listed}; --resources {listed} sets other bounds."
        )


if HERE:
    bound_resources()


def growing(value):
    """Return a resource that grows with each attempt. A profile may cap it."""
    return lambda wildcards, attempt: attempt * (value(wildcards) if callable(value) else value)


def all_gpus(wildcards):
    """Return the number of GPUs of a run. A dry run warns at its end if this machine lacks them."""
    reason = missing_gpus(wildcards.run)
    if reason and IS_DRY_RUN:
        warn_at_end(reason)
    return RESOURCES[wildcards.run]["gpus"]


def one_gpu(wildcards):
    """Return the number of GPUs of a job that is one process: one if the run has any."""
    return min(1, all_gpus(wildcards))


def several_nodes(wildcards):
    """Return the number of nodes of a training on several, else None, so that the resource is not set."""
    nodes = RESOURCES[wildcards.run]["nodes"]
    return nodes if nodes > 1 else None


@cache
def missing_gpus(run):
    """Return why a run cannot have its GPUs, or None. Another executor's jobs run on other machines.

    Snakemake would start a job that requests more than the user's bound, as if it requested the bound.
    """
    gpus, bound = RESOURCES[run]["gpus"], workflow.global_resources.get("gpu").value
    reason = lacking_gpus(gpus) if gpus and HERE else None
    if reason is None and bound is not None and gpus > bound:
        reason = (
            f"runs.{run}.resources.gpus: is {gpus}, and --resources gpu={bound} allows fewer; raise the bound"
        )
    return reason


@cache
def warn_at_end(reason):
    """Print a warning once, after all that Snakemake prints."""
    atexit.register(print, f"Warning: {reason}", file=sys.stderr)


def warn_of_other_code():
    """Print a line for each rule with outputs of this invocation that other code has made."""
    if workflow.dag is None:  # the Snakefile has an error
        return
    outputs = {file for job in workflow.dag.jobs for file in job.output}
    try:
        made = other_code(RESULTS).items()
    except ValueError as error:  # a damaged record
        print(f"Warning: {error}", file=sys.stderr)
        return
    end = "; it runs again" if CONFIG.strict_code else ""
    for line in by_rule(one for path, one in made if str(RESULTS / path) in outputs):
        print(f"{line}{end}", file=sys.stderr)


if IS_DRY_RUN:
    atexit.register(warn_of_other_code)


@cache
def force_other_code():
    """Run the jobs again whose outputs other code has made, as `--forcerun` does."""
    workflow.dag.forcefiles |= {str(RESULTS / path) for path in checked(other_code, RESULTS)}


FOLLOWER = Follower(RESULTS, CONFIGURED)


@cache
def recorder():
    """Return what records the jobs, and answers Snakemake from these records."""
    return Recorder(
        RESULTS,
        workflow.persistence,
        write=not IS_DRY_RUN,
        elsewhere=not HERE,
        config=CONFIG,
        snapshot=SNAPSHOT.stem,
        on_begin=FOLLOWER.start if enabled(CONFIG.tracking) else lambda: None,
        on_end=FOLLOWER.stop,
    )


def before_planning(wildcards):
    """Return no input. Snakemake calls this for each job before it decides which jobs run."""
    if workflow.is_main_process:
        recorder()
        if CONFIG.strict_code:
            force_other_code()
    return []


def in_future_now():
    """Return a line for each input of the jobs of this invocation whose time is in the future."""
    # A dry run counts all jobs as finished at its end.
    jobs = workflow.dag.needrun_jobs(exclude_finished=False)
    return in_future(file for job in jobs for file in job.input)


def warn_of_future():
    for line in in_future_now() if workflow.dag else []:
        print(f"Warning: {line}", file=sys.stderr)


if IS_DRY_RUN:
    atexit.register(warn_of_future)


def say_own_files():
    """Print a line for each dataset of the user's own files that this invocation needs."""
    if workflow.dag is None:  # the Snakefile has an error
        return
    needed = {job.wildcards.dataset for job in workflow.dag.jobs if job.rule.name == "index"}
    for line in (checked(own_text, CONFIG, RESULTS, name) for name in CONFIG.datasets if name in needed):
        if line:
            print(line, file=sys.stderr)


if IS_DRY_RUN:
    atexit.register(say_own_files)


def refuse_hopeless():
    """Stop before the first job if a job of this invocation lacks its GPUs, its text or space on the disk."""
    jobs = list(workflow.dag.needrun_jobs())
    reasons = {missing_gpus(job.wildcards.run) for job in jobs if "gpu" in job.resources.keys()} - {None}
    if reasons := [*sorted(reasons), *in_future_now(), *obstacles(CONFIG, RESULTS, items_of(jobs))]:
        raise WorkflowError(*reasons, "Nothing was started. `spider doctor` checks all that a run needs.")


def items_of(jobs):
    """Return the items of datasets that jobs read: the user's files, and what this machine downloads or streams."""
    items = {}
    for job in jobs:
        if job.rule.name in ("download", "download_temp", "encode", "encode_with_ngrams"):
            name = job.wildcards.dataset
            item = parts_of(name)[job.wildcards.part]
            downloads = HERE and job.rule.name.startswith("download")
            if downloads or CONFIG.datasets[name].source.own_files(item):
                items.setdefault(name, []).append(item)
        elif job.rule.name == "train" and HERE and stage_spec(job.wildcards).stream:
            items[stage_spec(job.wildcards).data] = []
    return items


# -------------------------------------------------------------------------------------------------- datasets


def dataset_of(wildcards):
    return CONFIG.datasets[wildcards.dataset]


@cache
def parts_of(dataset):
    """Return the parts of a dataset by name, each with the file or the piece that it is made from."""
    return checked(CONFIG.parts, dataset)


def watched(files):
    """Return the user's own files as inputs, so that a job runs again after an edit."""
    return [watch(file) for file in sorted(set(files))]


def watch(file):
    """Return an own file as an input.

    Snakemake takes braces in a path for a wildcard. So the main Snakefile stands for such a file, and only the
    recorder compares it.
    """
    if contains_wildcard(file):
        return flag(ancient(local(workflow.main_snakefile)), STANDS_FOR, file)
    return local(file)


def existing(key, files):
    """Return the user's own files that a key names. A missing one ends Snakemake, which would not name the key."""
    missing = [file for file in files if not Path(file).exists()]
    if missing:
        sys.exit(f"Error: {key}: {missing[0]}: no such file or folder")
    return watched(files)


def own_files(wildcards):
    """Return the user's own files that a part is read from."""
    return watched(dataset_of(wildcards).source.own_files(parts_of(wildcards.dataset)[wildcards.part]))


def raw_identity(wildcards):
    """Return what decides the content of a downloaded or imported part."""
    dataset = dataset_of(wildcards)
    return dataset.source.identity(parts_of(wildcards.dataset)[wildcards.part], dataset)


def encoding_identity(wildcards):
    """Return what decides the ids of a part, besides its text and its tokenizer."""
    dataset = dataset_of(wildcards)
    return dataset.encoding() | dataset.source.encoding(wildcards.part)


def part_files(pattern):
    """Return an input function that names one file for each part of a dataset."""
    return lambda wildcards: expand(f"<results>/{pattern}", part=parts_of(wildcards.dataset), **wildcards)


def raw_part(wildcards):
    """Return the file that a part is encoded from. Imported token ids are read where they lie."""
    if dataset_of(wildcards).source.TOKENS:
        return watch(parts_of(wildcards.dataset)[wildcards.part])
    return f"<results>/raw/{CONFIG.raw(wildcards.dataset)}/{wildcards.part}.parquet"


def earlier(step, wildcards):
    """Return the files of a step of cleaning of the parts whose documents come before those of a part.

    Documents of a dataset that compares none are all kept, so it has no evidence.
    """
    parts = CONFIG.earlier(wildcards.dataset, wildcards.part)
    if step == "raw":
        return [f"<results>/raw/{name}/{part}.parquet" for name, part in parts]
    if step == "removed":
        parts = [(name, part) for name, part in parts if CONFIG.cleaning(name)]
    return [f"<results>/cleaning/{name}/{step}/{part}.parquet" for name, part in parts]


def split_identity(wildcards):
    """Return what decides which documents of a part are held out, and their text."""
    dataset = dataset_of(wildcards)
    return dataset.held_out() | dataset.chosen() | dataset.changed(include={"max_document_bytes"})


def contamination_identity(wildcards):
    """Return what decides which documents of a part are contaminated, besides the protected text."""
    settings = CONFIG.decontaminated(wildcards.dataset)
    return split_identity(wildcards) | settings.changed(include={"words", "shortest", "common", "action"})


def protected_texts(wildcards):
    """Return the files of the held-out texts that a dataset is compared with."""
    datasets = CONFIG.protected(wildcards.dataset)
    return [
        f"<results>/cleaning/{name}/held_out/{part}.parquet" for name in datasets for part in parts_of(name)
    ]


def given_texts(wildcards):
    """Return the user's own files that a dataset is compared with: those of tasks, and others."""
    return watched(map(str, checked(protected.files, CONFIG, wildcards.dataset)))


def signatures_identity(wildcards):
    """Return what decides the signatures of a part, besides its text."""
    return dataset_of(wildcards).chosen() | ({"near": True} if CONFIG.near(wildcards.dataset) else {})


def candidates_identity(wildcards):
    """Return what decides the candidates of a part, besides signatures."""
    cleaning = CONFIG.cleaning(wildcards.dataset)
    return {"exact": cleaning.exact} | ({"near": cleaning.near.action} if cleaning.near else {})


def verified_identity(wildcards):
    """Return what decides the verified pairs of a part, besides texts: a reported one has the split of its pair."""
    near = CONFIG.cleaning(wildcards.dataset).near
    splits = {}
    if near.action == "report":
        names = {name for name, _ in CONFIG.earlier(wildcards.dataset, wildcards.part)} | {wildcards.dataset}
        splits = {name: CONFIG.dataset(name).held_out() for name in sorted(names)}
    return near.changed() | splits


def removed_part(wildcards):
    """Return the evidence of what encoding leaves out, if the documents of a dataset are compared."""
    raw = CONFIG.raw(wildcards.dataset)
    return f"<results>/cleaning/{raw}/removed/{wildcards.part}.parquet" if CONFIG.cleaning(raw) else []


def raw_records(wildcards):
    """Return the records of the downloaded parts of a dataset."""
    if dataset_of(wildcards).source.TOKENS:
        return []
    raw = f"<results>/raw/{CONFIG.raw(wildcards.dataset)}/{{part}}.json"
    return expand(raw, part=parts_of(wildcards.dataset))


def tokenizer_file(wildcards):
    """Return the tokenizer that encodes a dataset, or nothing for bytes."""
    dataset = dataset_of(wildcards)
    if dataset.source.own_tokenizer:
        return watch(dataset.source.own_tokenizer)
    return f"<results>/tokenizers/{dataset.tokenizer}/tokenizer.json" if dataset.tokenizer else []


def learned_from(wildcards):
    """Return the parts that a tokenizer is learned from."""
    tokenizer = CONFIG.tokenizers[wildcards.tokenizer]
    raw = f"<results>/raw/{CONFIG.raw(tokenizer.data)}/{{part}}.parquet"
    return expand(raw, part=parts_of(tokenizer.data))


def not_learned_from(wildcards):
    """Return the evidence of the documents that a tokenizer is not learned from, if they are compared."""
    raw = CONFIG.raw(CONFIG.tokenizers[wildcards.tokenizer].data)
    evidence = f"<results>/cleaning/{raw}/removed/{{part}}.parquet"
    return expand(evidence, part=parts_of(raw)) if CONFIG.cleaning(raw) else []


def tokenizer_identity(wildcards):
    """Return what decides a tokenizer, besides the text that it is learned from."""
    tokenizer = CONFIG.tokenizers[wildcards.tokenizer]
    return {**tokenizer.changed(exclude={"data"}), **CONFIG.datasets[tokenizer.data].held_out()}


#: Names of the datasets whose raw text is deleted after its last use.
TEMPORARY = [name for name, dataset in CONFIG.datasets.items() if dataset.temp]

#: Names of the datasets that keep documents for an n-gram index.
WITH_NGRAMS = [name for name, dataset in CONFIG.datasets.items() if dataset.ngram]


def metadata(dataset):
    """Return the file that describes the shards of a dataset. A stream has none."""
    streamed = CONFIG.datasets[dataset].source.STREAMED
    return [] if streamed else f"<results>/shards/{dataset}/metadata.json"


def indexes(*texts):
    """Return an input function that names the n-gram indexes of a run, if its model reads any."""

    def files(wildcards):
        run = CONFIG.runs[wildcards.run]
        folder = f"<results>/ngram/{run.dataset}/{run.model.ngram.counted}" if run.model.ngram else ""
        return [f"{folder}/{text}/index.json" for text in texts] if folder else []

    return files


def ngram_reader(wildcards, output):
    """Return a run that reads an n-gram index, for the command.

    The path of an index contains all that decides it. Snakemake does not record a param whose function takes
    ``output``, so another run that reads the same index is no reason to count again.
    """
    return CONFIG.ngram_reader(wildcards.dataset, wildcards.counted)


# ------------------------------------------------------------------------------------------- runs and stages


@cache
def spec_of(run, stage):
    return CONFIG.stage(run, stage)


def stage_spec(wildcards):
    return spec_of(wildcards.run, wildcards.stage)


def stage_settings(wildcards, output):
    """Return what the identity of a stage stands for, for the record of its job.

    Snakemake does not compare a param whose function takes ``output``.
    """
    return stage_spec(wildcards).recorded()


def stage_folders(*runs):
    """Return the folders of the stages of these runs."""
    return [f"<results>/runs/{run}/{stage.name}" for run in runs for stage in CONFIG.runs[run].stages]


def model_folders(*runs):
    """Return the folders of the stages of these runs, and those of their compressed models."""
    compressed = [run for run in runs if CONFIG.runs[run].compress]
    return stage_folders(*runs) + [f"{stage_folders(run)[-1]}/compressed" for run in compressed]


def scores(*runs):
    """Return the scores and samples of these runs."""
    names = ("evaluation.json", "sample.json", "sample.txt")
    between = [run for run in runs if CONFIG.runs[run].evaluation.checkpoints]
    files = expand("{folder}/{name}", folder=model_folders(*runs), name=names)
    files += [f"{folder}/checkpoints.json" for folder in stage_folders(*between)]
    return files + [f"{folder}/baselines.json" for folder in stage_folders(*runs)]


#: Files that extras add to the targets of the rule `all`.
WANTED = []
#: Functions of extras that name further files of a run, which its page and the comparison wait for.
MEASURED = []


def measured(*runs):
    """Return all that is measured, written and drawn of these runs."""
    figures = ("loss.svg", "inside.svg", "boundaries.html")
    drawn = expand("{folder}/{name}", folder=stage_folders(*runs), name=figures)
    answered = [run for run in runs if CONFIG.runs[run].harness]
    answers = [f"{stage_folders(run)[-1]}/harness.json" for run in answered]
    return scores(*runs) + drawn + answers + further(*runs)


def further(*runs):
    """Return the files of these runs that extras make. Call it when all rules are read."""
    return [file for run in runs for function in MEASURED for file in function(run)]


def training_data(wildcards):
    """Return the files that describe the datasets of a stage. A stream has none."""
    return [file for name in stage_spec(wildcards).weights if (file := metadata(name))]


def scored_data(wildcards):
    """Return the files that describe the datasets whose held-out text is scored."""
    names = [stage_spec(wildcards).evaluation.data, *CONFIG.sources(wildcards.run)]
    return [metadata(name) for name in dict.fromkeys(names)]


@cache
def stage_of(name, name_of):
    """Return a stage whose overlap or baselines have this name. Stages on one text share them."""
    return stage_with(CONFIG, name, name_of)


def texts_of(name_of):
    """Return an input function: what describes the scored text of a stage, and the text that its run may learn from."""

    def files(wildcards):
        spec = stage_of(wildcards.scored, name_of)
        names = [spec.evaluation.data, *(name for name, _ in learned_splits(CONFIG, spec))]
        return [metadata(name) for name in dict.fromkeys(names)]

    return files


def overlap_of(wildcards):
    """Return the overlap of the held-out text of a stage."""
    spec = (
        stage_of(wildcards.scored, baselines_name) if hasattr(wildcards, "scored") else stage_spec(wildcards)
    )
    return f"<results>/overlap/{overlap_name(CONFIG, spec)}.json"


def packed_rows(wildcards):
    """Return the plan of the rows of a stage, if they are packed."""
    return plans_of(stage_spec(wildcards))


def plans_of(spec):
    packed = [f"<results>/shards/{name}/packed-{spec.settings.seq_len}.json" for name in spec.weights]
    return packed if spec.settings.packing == "best_fit" else []


def measured_stage(wildcards):
    """Return the first stage of a shape, which its warm-up measures."""
    specs = (spec_of(wildcards.run, stage.name) for stage in CONFIG.runs[wildcards.run].stages)
    return next(spec for spec in specs if spec.shape == wildcards.shape)


def shape_settings(wildcards, output):
    """Return what a shape stands for, for the record of its job (as `stage_settings`)."""
    return measured_stage(wildcards).shape_fields()


def rows_with_documents(wildcards):
    """Return the plans that decide how many documents a row of the measured stage has."""
    spec = measured_stage(wildcards)
    return plans_of(spec) if spec.settings.attend == "document" else []


def receipt(wildcards):
    """Return the file that names the weights of a stage, or of its compressed model."""
    name = "compressed/compress.json" if wildcards.compressed else "train.json"
    return f"<results>/runs/{wildcards.run}/{wildcards.stage}/{name}"


def compressed_option(wildcards):
    return "--compressed" if wildcards.compressed else ""


def previous_receipt(wildcards):
    """Return the receipt of the stage before. The first stage has none."""
    before = stage_folders(wildcards.run)[: stage_spec(wildcards).index]
    return f"{before[-1]}/train.json" if before else []


def task_files(wildcards):
    """Return the user's own files that the questions of a stage are read from."""
    key = f"runs.{wildcards.run}.evaluation.tasks"
    tasks = stage_spec(wildcards).evaluation.tasks
    return sorted({file for name, task in tasks.items() for file in existing(f"{key}.{name}", task.files())})


def foreign_spec(wildcards):
    """Return the stage whose text and tasks a foreign model shares."""
    return CONFIG.scored_like(CONFIG.foreign[wildcards.run])


def foreign_files(wildcards):
    """Return the files of a foreign model."""
    return existing(f"foreign.{wildcards.run}.model", CONFIG.foreign[wildcards.run].files())


def compress_identity(wildcards):
    """Return how a run is compressed. A target may name any stage of any run."""
    return (CONFIG.runs[wildcards.run].compress or CompressConfig()).changed()


def harness_config(wildcards):
    """Return the block of a run. A target may name any stage of any run."""
    return CONFIG.runs[wildcards.run].harness or HarnessConfig()


def harness_files(wildcards):
    """Return the files that the user's own tasks are read from."""
    return existing(f"runs.{wildcards.run}.harness.include", harness_config(wildcards).files())


def harness_options(wildcards):
    """Return the options of the command for a run."""
    block = harness_config(wildcards)
    words = ["--tasks", ",".join(block.tasks), "--batch", str(CONFIG.runs[wildcards.run].evaluation.batch)]
    for option, value in (("include", block.include), ("items", block.items), ("shots", block.shots)):
        words += [f"--{option}", str(value)] if value is not None else []
    return shlex.join(words + ["--chat"] * block.chat)


# ---------------------------------------------------------------------------------------------------- report


def shown(path, category, what):
    """Return an output that Snakemake's report shows, with the caption of its name."""
    stage = next((label for label in ("{stage}{compressed}", "{stage}") if label in path), None)
    return report(
        f"<results>/{path}",
        caption=f"captions/{Path(path).stem}.rst",
        category=category,
        subcategory="{run}" if stage else None,
        labels={"stage": stage, "what": what} if stage else {"what": what},
    )


def estimate(job):
    """Return a function that returns the seconds of a training by its warm-up, and None for other jobs."""
    if job.rule.name != "train":
        return lambda: None
    spec = stage_spec(job.wildcards)
    return partial(progress.training_seconds, spec, RESULTS / f"runs/{spec.run}/warmup-{spec.shape}.json")


def begin():
    """Write the configuration, before the first job."""
    checked(write_config, RESULTS, config)
    progress.plan({str(job.benchmark): estimate(job) for job in workflow.dag.needrun_jobs() if job.benchmark})
    say_own_files()
    if CONFIG.strict_code:
        warn_of_other_code()


def finish(status):
    """Close the display and the records of this invocation, and print what a successful one reached."""
    progress.close()
    recorder().close(status)
    summary = RESULTS / "report/summary.json"
    if status == "finished" and summary.exists():
        from spider.report.tables import Invocation, terminal_summary

        snakefile, settings = Path(workflow.main_snakefile).resolve(), workflow.config_settings
        # This file has the content of all configuration files and of `--config`.
        config = RESULTS.absolute() / "config.yaml"
        if not settings.config and len(settings.configfiles) < 2:
            config = next(iter(settings.configfiles), None)
        started = Invocation(
            config=config,
            snakefile=None if snakefile.parent == Path.cwd().resolve() else snakefile,
            tracked=CONFIG.tracking.enabled,
        )
        terminal_summary(summary, started=started)
