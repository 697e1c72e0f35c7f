"""What the configuration asks for, and the inputs and params of the rules."""

from spider.config.block import none_such

AUDITS = {
    run: how
    for name, how in CONFIG.extras.get("audit", {}).items()
    for run in CONFIG.sweeps.get(name, [name])
}
TRACED = set(CONFIG.extras.get("trace", []))

wrong = [
    f"audit.{name}: {none_such('run', name, CONFIG.runs)}" for name in AUDITS.keys() - CONFIG.runs.keys()
]
wrong += [f"trace: {none_such('dataset', name, CONFIG.datasets)}" for name in TRACED - CONFIG.datasets.keys()]
if wrong:
    sys.exit("error: " + "\n".join(sorted(wrong)))


def audits(run):
    """Return the audits of the last stage of a run and of its compressed model, if it is audited."""
    audited = plan.model_folders(run)[len(CONFIG.runs[run].stages) - 1 :] if AUDITS.get(run) else []
    return [f"{folder}/audit.json" for folder in audited]


def audited_data(wildcards):
    """Return the files that describe all that a score was made from."""
    learned = CONFIG.learned(wildcards.run, wildcards.stage)
    return plan.metadata(*learned, plan.stage_of(wildcards).evaluation.data)


def audit_options(wildcards):
    """Return the options of the command. A target may name any stage of any run."""
    quick = AUDITS.get(wildcards.run) == "quick"
    return shlex.join(["--compressed"] * bool(wildcards.compressed) + ["--quick"] * quick)


def text_indexes(dataset):
    """Return the files that describe the index of the training text of a dataset."""
    return expand(f"<results>/text/{dataset}/{{part}}.json", part=plan.parts(dataset))


def learned_texts(wildcards):
    """Return the indexes of the texts that a run has learned from by the end of a stage, or looks up."""
    return [file for name in CONFIG.learned(wildcards.run, wildcards.stage) for file in text_indexes(name)]


def traces(run):
    """Return the traces of the samples of a run whose training text is indexed."""
    stages = [stage.name for stage in CONFIG.runs[run].stages]
    traced = [stage for stage in stages if TRACED.issuperset(CONFIG.learned(run, stage))]
    return [f"<results>/runs/{run}/{stage}/trace.json" for stage in traced]


def megabytes(wildcards):
    """Return the size of the training text of a part."""
    return plan.requests.size(wildcards.dataset, ("ngram", "train"), wildcards.part, "bytes")[0] / 1e6
