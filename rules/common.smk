"""The configuration of the workflow, its records, and what happens before its first job and after its last one.

What the rules ask of the configuration is in `spider.workflow.Plan`. Parsing this file uses no network, and a job that
parses it again writes nothing. Snakemake documents no interface for these attributes of `workflow`:

- `is_main_process`: jobs parse this file again, with the configuration that the workflow started with.
- `modifier`, `pathvars.apply`: a workflow around this one, as a module, may move the results folder.
- `output_settings.dryrun`, `nodes`: nothing is written in a dry run; only with another executor there are nodes.
- `global_resources`: the GPUs and the memory of this machine bound all jobs at once.
- `persistence`: the records in the results folder decide which jobs run (`spider.provenance.recorder`).
- `rules`, `dag`: the records are asked first, `strict_code` runs jobs again, and hopeless jobs are refused.

The tests of the workflow cover each of them.
"""

import atexit
import os
import shlex
import sys
from functools import cache
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.settings.types import DeploymentMethod

from spider.common import extras
from spider.workflow.start import one_word, remedies
from spider.common.files import digest
from spider.common.results import MARK, check_root, snapshot, write_config
from spider.config import load_config
from spider.config.schema import read_yaml
from spider.config.scored import baselines_name, overlap_name
from spider.processes.gpus import bounds
from spider.provenance.codefiles import ROOT
from spider.provenance.lineage import by_rule, other_code
from spider.provenance.made import real
from spider.provenance.recorder import Recorder
from spider.tracking.follower import REMEDY, Follower
from spider.tracking.target import enabled
from spider.workflow import progress
from spider.workflow.plan import Plan, checked, growing, requested
from spider.workflow.start import enter

IS_MODULE = not workflow.modifier.is_main_snakefile()
IS_DRY_RUN = workflow.output_settings.dryrun
# Whether jobs run on this machine.
HERE = workflow.is_main_process and workflow.nodes is None

# --------------------------------------------------------------------------------------------- configuration

# A scheduler's job parses this file again, and the user may have edited the configuration by then. So the main
# process names its copy of the configuration in a variable. Each module has a variable of its own.
HANDED_DOWN = "SPIDER_CONFIG_" + digest(
    [workflow.modifier.namespace, workflow.modifier.modify_path("results")]
)
if workflow.is_main_process:
    for file in workflow.configfiles:
        checked(read_yaml, Path(file))  # Snakemake takes the last of two equal keys.
else:
    handed = checked(read_yaml, Path(os.environ[HANDED_DOWN]))
    # The copy of a module has the folder where the workflow around it moves the results.
    config = {**handed, "results": config.get("results", "results")} if IS_MODULE else handed

CONFIG = checked(load_config, config)


pathvars:
    results=CONFIG.results,
    logs="<results>/logs",
    benchmarks="<results>/benchmarks",


RESULTS = Path(workflow.modifier.modify_path(workflow.pathvars.apply("<results>/spider.json"))).parent
checked(check_root, RESULTS)
if Path(CONFIG.results).is_absolute() and workflow.modifier.modify_path("a") != "a":
    sys.exit(
        f"error: results: {CONFIG.results} is absolute, and a module's `prefix:` cannot move it; "
        "name a relative folder"
    )

# Every job reads a copy of this, which includes `--config` overrides. Its name is a digest of its text.
SETTINGS = {**config, "results": str(RESULTS)} if IS_MODULE else config
SNAPSHOT = snapshot(RESULTS, SETTINGS)
if workflow.is_main_process:
    os.environ[HANDED_DOWN] = str(SNAPSHOT)
    # glibc reads this when a job starts: ask Linux for pages of 2 MB. A processor finds those faster.
    os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    # Open until the process ends.
    ENTERED = None if IS_DRY_RUN else checked(enter, Path.cwd(), RESULTS)
    if not (HERE or IS_DRY_RUN):
        # The script of a scheduler's job names the interpreter without quotes.
        sys.executable = checked(one_word, sys.executable)

# An empty results folder is restored before Snakemake looks at its files.
MIRROR = None
if CONFIG.mirror and workflow.is_main_process and not IS_DRY_RUN:
    from spider.workflow.mirror import Mirror

    MIRROR = checked(Mirror, CONFIG.mirror, RESULTS, list(CONFIG.runs))
    if not (RESULTS / MARK).exists() and checked(MIRROR.acquire):
        MIRROR.release()


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
    last=r"\d+",
    bucket=r"\d+",
    scored="[0-9a-f]{16}",


# A job in a container finds `spider` and all packages in the image, and its code in this checkout.
IN_CONTAINER = DeploymentMethod.APPTAINER in workflow.deployment_settings.deployment_method
if IN_CONTAINER and not CONFIG.container:
    sys.exit(
        "error: --sdm apptainer needs an image: set `container: spider.sif` in the configuration (docs/cluster.md)"
    )

# Where the user sets no bound, the jobs at once use at most the GPUs and the memory of this machine.
OWN_BOUNDS = {name: most for name, most in bounds().items() if most} if HERE else {}
OWN_BOUNDS = {name: most for name, most in OWN_BOUNDS.items() if name not in workflow.global_resources}
for name, most in OWN_BOUNDS.items():
    workflow.global_resources[name] = most

plan = Plan(CONFIG, RESULTS, here=HERE, bound=workflow.global_resources.get("gpu").value)


def command(wildcards, output):
    """Return the words that begin every job: `spider` of this environment, and the configuration.

    A scheduler sends SIGTERM to all processes of a job. The trap keeps the shell alive until the command ends, which
    may save a checkpoint first. A moved folder is no reason to run a job again (`spider.workflow.plan`).
    """
    words = [Path(sys.executable).with_name("spider")]
    if IN_CONTAINER:
        words = ["env", f"PYTHONPATH={':'.join(map(str, [ROOT, *ROOT.glob('extras/*')]))}", "spider"]
    words += ["--config", SNAPSHOT]
    return f"trap : TERM; {shlex.join(map(str, words))}"


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


# --------------------------------------------------------------------------------------------------- records

FOLLOWERS = []
if enabled(CONFIG.tracking):
    words = ["--config", SNAPSHOT, "track", "sync"]
    lacking = "the tracking store did not get all records"
    FOLLOWERS.append(Follower(RESULTS / "tracking/sync.log", words, lacking, REMEDY, timeout=20))
if MIRROR:
    words = ["--config", SNAPSHOT, "mirror", "push"]
    remedy = "`spider mirror push` copies the rest"
    COPIER = Follower(RESULTS / "logs/mirror.log", words, "the mirror has not all", remedy, timeout=None)


def take_lease():
    """Take the lease on the mirror, for the process that copies."""
    if MIRROR is None or COPIER in FOLLOWERS:
        return
    if checked(MIRROR.acquire):
        MIRROR.release(lease=False)
        FOLLOWERS.append(COPIER)
    else:
        print(f"Warning: {RESULTS} is mirrored by another process; {remedy}", file=sys.stderr)


def start_followers():
    """Start what runs beside the jobs."""
    take_lease()  # A module has no `onstart`, and its first jobs run by now.
    for one in FOLLOWERS:
        one.start()


def stop_followers():
    for one in FOLLOWERS:
        one.stop()


@cache
def recorder():
    """Return what records the jobs, and answers Snakemake from these records. Write the configuration."""
    if not IS_DRY_RUN:
        checked(write_config, RESULTS, SETTINGS)
    if CONFIG.strict_code:
        # Run the jobs again whose outputs other code has made, as `--forcerun` does.
        workflow.dag.forcefiles |= {str(RESULTS / path) for path in checked(other_code, RESULTS)}
    return Recorder(
        RESULTS,
        workflow.persistence,
        write=not IS_DRY_RUN,
        elsewhere=not HERE,
        config=CONFIG,
        snapshot=SNAPSHOT.stem,
        on_begin=start_followers,
        on_end=stop_followers,
    )


def before_planning(wildcards):
    """Return no input. Snakemake calls this for each job before it decides which jobs run."""
    if workflow.is_main_process:
        recorder()
    return []


# -------------------------------------------------------------------------------------------------- handlers


def warn_of_other_code():
    """Print a line for each rule with outputs of this invocation that other code has made."""
    outputs = {file for job in workflow.dag.jobs for file in job.output}
    end = "; it runs again" if CONFIG.strict_code else ""
    made = other_code(RESULTS).items()
    for line in by_rule(one for path, one in made if str(RESULTS / path) in outputs):
        print(f"{line}{end}", file=sys.stderr)


def after_dry_run():
    """Print what the plan would refuse or say, after all that Snakemake prints."""
    if workflow.dag is None:  # The Snakefile has an error.
        return
    # A dry run counts all jobs as finished at its end.
    jobs = list(workflow.dag.needrun_jobs(exclude_finished=False))
    try:
        warnings = [f"Warning: {reason}" for reason in (*plan.future_inputs(jobs), *plan.lacking_gpus(jobs))]
        for line in (*plan.own_texts(workflow.dag.jobs), *warnings):
            print(line, file=sys.stderr)
        warn_of_other_code()
    except ValueError as error:
        print(f"Warning: {error}", file=sys.stderr)
    if CONFIG.mirror and not (RESULTS / MARK).exists():
        print(f"A run first restores what is at {CONFIG.mirror}; a dry run does not look there.")
    if OWN_BOUNDS:
        listed = " ".join(f"{name}={most}" for name, most in OWN_BOUNDS.items())
        print(f"All jobs at once use at most {listed}; --resources {listed} sets other bounds.")


if IS_DRY_RUN:
    atexit.register(after_dry_run)


def begin():
    """Refuse hopeless jobs before the first one starts, and say what this invocation reads."""
    jobs = list(workflow.dag.needrun_jobs())
    if reasons := plan.hopeless(jobs):
        raise WorkflowError(*reasons, "Nothing was started. `spider doctor` checks all that a run needs.")
    for line in checked(plan.own_texts, workflow.dag.jobs):
        print(line, file=sys.stderr)
    if jobs:
        take_lease()
    if CONFIG.strict_code:
        warn_of_other_code()


def finish(status):
    """Close the display and the records of this invocation, and print what a successful one reached."""
    progress.close()
    recorder().close(status)
    summary = RESULTS / "report/summary.json"
    if status == "finished" and summary.exists():
        from spider.report.tables import Invocation, terminal_summary

        # The copy of the configuration has the content of all files and of `--config`.
        same = (Path(file).absolute() for file in workflow.configfiles if read_yaml(Path(file)) == config)
        chosen = next(same, RESULTS.absolute() / "config.yaml")
        snakefile = Path(workflow.basedir, "Snakefile").resolve()
        started = Invocation(
            config=None if chosen == Path("config.yaml").absolute() else chosen,
            snakefile=None if snakefile.parent == Path.cwd().resolve() else snakefile,
            tracked=CONFIG.tracking.enabled,
        )
        terminal_summary(summary, started=started)
