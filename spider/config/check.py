"""What no block can see by itself: whether the parts of a configuration go together."""

from __future__ import annotations

from spider.config.block import NAME
from spider.config.data import StreamSource
from spider.config.explain import ConfigError, nearest
from spider.config.run import Run, StageSettings
from spider.config.schema import Config


def problems_of(config: Config) -> list[str]:
    """All that is wrong, a line each with the path of its key."""
    problems = []
    for kind, names in (("datasets", config.datasets), ("runs", config.runs)):
        problems += [
            f"{kind}.{n}: a name is letters, digits, - and _ (it becomes a folder)"
            for n in names
            if not NAME.fullmatch(n)
        ]
    for name, run in config.runs.items():
        problems += [f"runs.{name}.{p}" for p in [*_run_problems(run), *_evaluation_problems(config, run)]]
        for i in range(len(run.stages)):
            problems += [f"runs.{name}.stages[{i}]{p}" for p in _stage_problems(config, name, i)]
        scored = run.evaluation.data or run.data
        if scored in config.datasets and config.datasets[scored].validation == 0:
            problems.append(f"datasets.{scored}.validation: must be above 0, runs.{name} is evaluated on it")
    return [*problems, *_scaling_problems(config)]


def _run_problems(run: Run) -> list[str]:
    problems = run.model.problems(run.precision, run.compile)
    if run.optimizer.master_weights == "bf16" and run.precision not in ("bf16", "fp8"):
        problems.append(
            "optimizer.master_weights: bf16 weights cannot be multiplied in fp32, which "
            f"precision: {run.precision} may come to; set precision: bf16 or fp8"
        )
    if run.optimizer.master_weights == "bf16" and run.parallel == "fsdp":
        problems.append(
            "optimizer.master_weights: parallel: fsdp shares fp32 weights only; set fp32 (each "
            "process then holds a share of them), or parallel: ddp"
        )
    return problems


def _stage_problems(config: Config, run_name: str, i: int) -> list[str]:
    run = config.runs[run_name]
    stage, before = run.stages[i], [s.name for s in run.stages[:i]]
    problems = []
    if not NAME.fullmatch(stage.name):
        problems.append(f".name: a name is letters, digits, - and _ (got {stage.name!r})")
    if stage.name in before:
        return [*problems, f".name: {stage.name!r} is used twice in this run"]
    resolved = config.stage(run_name, stage.name)
    problems += _horizon_problems(resolved.settings)
    try:
        resolved.micro_batch(resolved.processes)
    except ConfigError as error:
        problems.append(f": {error}")
    keep_every, ckpt_every = resolved.settings.keep_every, resolved.settings.ckpt_every
    if keep_every and keep_every % ckpt_every:
        problems.append(
            ".keep_every: must be a multiple of ckpt_every, only what is saved can be kept "
            f"(got {keep_every}, ckpt_every is {ckpt_every})"
        )
    if run.model.LOOPS is None and resolved.loops != 1:
        problems.append(f".n_loops: the family {run.model.family} has no loops; leave it out")
    if resolved.data not in config.datasets:
        problems.append(f".data: no dataset {resolved.data!r}{nearest(resolved.data, list(config.datasets))}")
    return problems


def _evaluation_problems(config: Config, run: Run) -> list[str]:
    scored = run.evaluation.data or run.data
    if scored not in config.datasets:
        return [f"evaluation.data: no dataset {scored!r}{nearest(scored, list(config.datasets))}"]
    if isinstance(config.datasets[scored].source, StreamSource):
        return [f"evaluation.data: {scored!r} is a stream and has no validation shards; name another"]
    return []


def _scaling_problems(config: Config) -> list[str]:
    """What keeps a law from being fitted; better said before its runs are trained than after."""
    sweep = config.scaling
    if sweep is None:
        return []
    if sweep not in config.sweeps:
        return [f"scaling: no run {sweep!r} with a grid{nearest(sweep, list(config.sweeps))}"]
    runs = [config.runs[name] for name in config.sweeps[sweep]]
    if (count := len(runs[0].stages)) != 1:
        return [f"runs.{sweep}.stages: what a scaling law is fitted to has one stage (here are {count})"]
    budgets = {
        config.stage(name, runs[0].stages[0].name).settings.target_flops for name in config.sweeps[sweep]
    }
    models = {run.model.model_dump_json() for run in runs}
    if None in budgets or len(budgets) < 2 or len(models) < 3:
        return [
            f"runs.{sweep}.grid: a scaling law needs at least 3 models and 2 values of target_flops "
            f"(here are {len(models)} and {len(budgets - {None})})"
        ]
    return []


def _horizon_problems(s: StageSettings) -> list[str]:
    known = (s.tokens, s.max_steps, s.target_flops, s.tokens_per_parameter)
    if all(n is None for n in (*known, s.max_hours)):
        return [": needs tokens, max_steps, target_flops, tokens_per_parameter or max_hours"]
    if s.max_hours is not None and s.schedule not in ("wsd", "constant"):
        return [
            f".max_hours: schedule: {s.schedule} must know its last step from the first; set schedule: wsd, "
            "which decays when time runs out, or constant"
        ]
    return []
