"""A page for each run, which Snakemake's report includes, and a scaling law for a sweep."""


rule report:
    input:
        "<results>/report/summary.json",
        lambda wildcards: measured(wildcards.run),  # The page shows the costs and commands of all these jobs.
    output:
        report(
            "<results>/report/runs/{run}.html",
            caption="captions/report.rst",
            category="Runs",
            labels={"run": "{run}", "what": "the whole run on a page"},
        ),
    log:
        "<logs>/report/{run}.log",
    benchmark:
        "<benchmarks>/report/report/runs/{run}.tsv"
    localrule: True
    resources:
        mem_mb=growing(2000),
        runtime=growing(10),
    params:
        spider=command,
    shell:
        "{params.spider} --log {log:q} report page {wildcards.run} --output {output:q}"


if CONFIG.scaling:

    rule scaling:
        input:
            expand("{folder}/evaluation.json", folder=stage_folders(*CONFIG.sweeps[CONFIG.scaling])),
        output:
            "<results>/report/scaling.md",
            shown("report/scaling.svg", "Comparison", "scaling law"),
            law="<results>/report/scaling.json",
        log:
            "<logs>/scaling.log",
        benchmark:
            "<benchmarks>/scaling/report/scaling.tsv"
        localrule: True
        resources:
            mem_mb=growing(2000),
            runtime=growing(10),
        params:
            spider=command,
        shell:
            "{params.spider} --log {log:q} report scaling --output {output.law:q}"
