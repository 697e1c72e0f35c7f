"""Everything about a run on one page, `report/runs/{run}.html`, also a part of Snakemake's own report."""


rule report:
    input:
        "<results>/report/summary.json",
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
        "{params.spider} --log {log:q} report {wildcards.run} --output {output:q}"
