"""Raw text to a trained, evaluated, tracked byte-level language model.

    download --> encode --> index --> [warmup] --> train (stage by stage) --> evaluate --> compare --> report

`config.yaml` says what to train on what; `snakemake --cores all` does it; `snakemake --cores all runs/NAME` or
`datasets/NAME` does a part of it. Every rule is one `spider` command that you can also run by hand.
"""

from snakemake.utils import min_version

min_version("9.19")  # paths by `pathvars`, in modules too

if not workflow.overwrite_configfiles:

    configfile: "config.yaml"


include: "rules/common.smk"


rule all:
    input:
        "<results>/report/summary.json",
        expand("<results>/report/runs/{run}.html", run=CONFIG.runs),
        "<results>/report/scaling.json" if CONFIG.scaling else [],


include: "rules/data.smk"
include: "rules/train.smk"
include: "rules/evaluate.smk"
include: "rules/report.smk"
include: "rules/scaling.smk"
include: "rules/parts.smk"


onstart:
    write_config(SNAPSHOT, config)
    tracking.open_pipeline(RESULTS, CONFIG)


onsuccess:
    finish("finished")


onerror:
    finish("failed")
    for advice in remedies(log):
        print(advice, file=sys.stderr)
