"""A page for each run, which Snakemake's report includes, and a page for all ladders."""


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


rule ladders:
    input:
        forecasts(),
        expand("{folder}/evaluation.json", folder=waiting_folders()),
    output:
        "<results>/report/ladders.json",
        shown("report/ladders.svg", "Comparison", "ladders"),
        page="<results>/report/ladders.html",
    log:
        "<logs>/ladders.log",
    benchmark:
        "<benchmarks>/ladders/report/ladders.tsv"
    localrule: True
    resources:
        mem_mb=growing(2000),
        runtime=growing(10),
    params:
        spider=command,
    shell:
        "{params.spider} --log {log:q} report ladders --output {output.page:q}"
