"""Scores to audits, samples to traces, and the index of the training text that a trace searches.

`audit:` names the runs whose last stage is audited. A check that fails stops nothing: the job logs a warning, and the
views show the failure. `trace:` names the datasets whose training text is indexed. The sample of each stage is traced
that has learned from such text alone.
"""

AUDITS = {
    run: how
    for name, how in CONFIG.extras.get("audit", {}).items()
    for run in CONFIG.sweeps.get(name, [name])
}
TRACED = set(CONFIG.extras.get("trace", []))

for name in AUDITS:
    CONFIG.run(name)  # names a wrong one
for name in TRACED:
    CONFIG.dataset(name)


def audits(run):
    """Return the audits of the last stage of a run and of its compressed model, if it is audited."""
    audited = model_folders(run)[len(CONFIG.runs[run].stages) - 1 :] if AUDITS.get(run) else []
    return [f"{folder}/audit.json" for folder in audited]


def audited_data(wildcards):
    """Return the files that describe all that a score was made from."""
    learned = CONFIG.learned(wildcards.run, wildcards.stage)
    names = dict.fromkeys([*learned, stage_spec(wildcards).evaluation.data])
    return [file for name in names if (file := metadata(name))]


def audit_options(wildcards):
    """Return the options of the command. A target may name any stage of any run."""
    quick = AUDITS.get(wildcards.run) == "quick"
    return shlex.join(["--compressed"] * bool(wildcards.compressed) + ["--quick"] * quick)


def text_indexes(dataset):
    """Return the files that describe the index of the training text of a dataset."""
    return expand(f"<results>/text/{dataset}/{{part}}.json", part=parts_of(dataset))


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
    return REQUESTS.size(wildcards.dataset, ("ngram", "train"), wildcards.part, "bytes")[0] / 1e6


MEASURED.append(lambda run: audits(run) + traces(run))


rule audit:
    input:
        receipt=receipt,
        evaluation="<results>/runs/{run}/{stage}{compressed}/evaluation.json",
        data=audited_data,
        ngram=indexes("split", "full"),
        tasks=task_files,
    output:
        "<results>/runs/{run}/{stage}{compressed}/audit.json",
    log:
        "<logs>/audit/{run}/{stage}{compressed}.log",
    benchmark:
        "<benchmarks>/audit/runs/{run}/{stage}{compressed}/audit.tsv"
    threads: lookup(dpath="{run}/threads", within=RESOURCES)
    resources:
        gpu=one_gpu,
        mem_mb=lookup(dpath="{run}/mem_mb", within=RESOURCES),
        # A whole audit scores the text again and trains a stretch of the stage.
        runtime=growing(lookup(dpath="{run}/runtime", within=RESOURCES)),
    params:
        spider=command,
        options=audit_options,
    shell:
        "{params.spider} --log {log:q} audit {wildcards.run}/{wildcards.stage} {params.options} --warn "
        "--threads {threads} --output {output:q}"


rule index_text:
    input:
        lambda wildcards: metadata(wildcards.dataset),
    output:
        "<results>/text/{dataset}/{part}.json",
    log:
        "<logs>/index_text/{dataset}/{part}.log",
    benchmark:
        "<benchmarks>/index_text/text/{dataset}/{part}.tsv"
    resources:
        mem_mb=growing(lambda wildcards: round(400 + 8 * megabytes(wildcards))),
        runtime=growing(lambda wildcards: 30 + round(megabytes(wildcards) / 120)),
    params:
        spider=command,
    shell:
        "{params.spider} --log {log:q} data index-text {wildcards.dataset} {wildcards.part} --output {output:q}"


rule trace:
    input:
        "<results>/runs/{run}/{stage}/sample.json",
        text=learned_texts,
    output:
        "<results>/runs/{run}/{stage}/trace.json",
    log:
        "<logs>/trace/{run}/{stage}.log",
    benchmark:
        "<benchmarks>/trace/runs/{run}/{stage}/trace.tsv"
    resources:
        mem_mb=growing(2000),
        runtime=growing(10),
    params:
        spider=command,
    shell:
        "{params.spider} --log {log:q} trace {wildcards.run}/{wildcards.stage} --output {output:q}"


# Targets for the index of the training text of each stored dataset.
for name in [name for name, dataset in CONFIG.datasets.items() if not dataset.source.STREAMED]:

    rule:
        name:
            f"text/{name}"
        input:
            text_indexes(name),
