"""Raw text to a trained, evaluated, tracked language model, over bytes or tokens.

    download --> [tokenizer] --> encode --> index --> [pack] --> [count_ngrams --> build_ngrams] --> [warmup]
             --> train (stage by stage) --> evaluate, sample, draw --> [compress] --> compare --> report

`config.yaml` says what to train on what; `snakemake --cores all` does it; `snakemake --cores all runs/NAME` or
`datasets/NAME` does a part of it. Every rule is one `spider` command that you can also run by hand.
"""

from snakemake.utils import min_version

min_version("9.19")  # paths by `pathvars`, in modules too

# Jobs that parse this file again are handed the configuration of their workflow.
if workflow.is_main_process and not workflow.overwrite_configfiles:

    configfile: "config.yaml"


include: "rules/common.smk"


rule all:
    input:
        "<results>/report/summary.json",
        expand("<results>/report/runs/{run}.html", run=CONFIG.runs),
        measured(CONFIG.runs),
        "<results>/report/scaling.json" if CONFIG.scaling else [],


include: "rules/data.smk"
include: "rules/ngram.smk"
include: "rules/train.smk"
include: "rules/evaluate.smk"
include: "rules/compress.smk"
include: "rules/report.smk"


# Names for parts of the whole, a dataset, a run or a sweep of runs.
parts = {f"datasets/{name}": metadata(name) for name in CONFIG.datasets}
parts |= {f"runs/{name}": measured([name]) for name in CONFIG.runs}
parts |= {f"runs/{name}": measured(runs) for name, runs in CONFIG.sweeps.items()}

for part, files in parts.items():

    rule:
        name:
            part
        input:
            files,


onstart:
    if PRESENCE:
        PRESENCE.record_locks()
    refuse_missing_gpus()
    checked(write_config, RESULTS, config)
    tracking.open_pipeline(RESULTS, CONFIG)


onsuccess:
    finish("finished")


onerror:
    finish("failed")
    for advice in remedies(log):
        print(advice, file=sys.stderr)
