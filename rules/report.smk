"""Everything about a run on one page, also a part of Snakemake's own report; a scaling law through a sweep."""


rule report:
    input:
        "<results>/report/summary.json",
        lambda wildcards: measured([wildcards.run]),  # so that the page has the costs and commands of all of it
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
        "<benchmarks>/report/{run}.tsv"
    resources:
        mem_mb=2000,
        runtime=longer(10),
    params:
        spider=command,
    shell:
        "{params.spider} --log {log:q} report page {wildcards.run} --output {output:q}"


if CONFIG.scaling:

    rule scaling:
        input:
            evaluations(CONFIG.sweeps[CONFIG.scaling]),
        output:
            "<results>/report/scaling.md",
            shown("report/scaling.svg", "Comparison", "scaling law"),
            law="<results>/report/scaling.json",
        log:
            "<logs>/scaling.log",
        benchmark:
            "<benchmarks>/scaling/scaling.tsv"
        resources:
            mem_mb=2000,
            runtime=longer(10),
        params:
            spider=command,
        shell:
            "{params.spider} --log {log:q} report scaling --output {output.law:q}"
