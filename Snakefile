"""Raw text to a trained, evaluated, tracked byte-level language model.

    download --> encode --> index --> [warmup] --> train (stage by stage) --> evaluate --> compare --> report

`config.yaml` says what to train on what; `snakemake --cores all` does it; `snakemake --cores all runs/NAME` or
`datasets/NAME` does a part of it. Every rule is one `spider` command that you can also run by hand.
"""

if not workflow.overwrite_configfiles:

    configfile: "config.yaml"


include: "rules/common.smk"


pathvars:
    results=CONFIG.results,
    logs=f"{CONFIG.results}/logs",
    benchmarks=f"{CONFIG.results}/benchmarks",


include: "rules/data.smk"
include: "rules/train.smk"
include: "rules/evaluate.smk"
include: "rules/report.smk"
include: "rules/scaling.smk"


localrules:
    all,


rule all:
    default_target: True
    input:
        "<results>/report/summary.json",
        expand("<results>/report/runs/{run}.html", run=CONFIG.runs),
        "<results>/report/scaling.json" if CONFIG.scaling else [],


for run in CONFIG.runs:

    rule:
        name:
            f"runs/{run}"
        input:
            [f"<results>/runs/{run}/{stage}/evaluation.json" for stage in stages(run)],
        localrule: True


for sweep, runs in CONFIG.sweeps.items():

    rule:
        name:
            f"runs/{sweep}"
        input:
            [f"<results>/runs/{run}/{stage}/evaluation.json" for run in runs for stage in stages(run)],
        localrule: True


for dataset in CONFIG.datasets:

    rule:
        name:
            f"datasets/{dataset}"
        input:
            metadata(dataset),
        localrule: True


onstart:
    write_config(SNAPSHOT, config)
    tracking.open_pipeline(RESULTS, CONFIG)


onsuccess:
    finish("finished")


onerror:
    finish("failed")
    for advice in remedies(log):
        print(advice, file=sys.stderr)
