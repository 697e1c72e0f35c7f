"""A page for each run, which Snakemake's report includes."""


rule report:
    input:
        "<results>/report/summary.json",
        # The page shows the costs and commands of all these jobs.
        lambda wildcards: plan.measured(wildcards.run),
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
        **requested(lambda wildcards: plan.requests.showing(wildcards.run)),
    params:
        spider=command,
    shell:
        "{params.spider} --log {log:q} report page {wildcards.run} --output {output:q}"
