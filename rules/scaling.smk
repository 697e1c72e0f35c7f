"""A scaling law through the runs of the sweep that the configuration names."""

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
            "{params.spider} --log {log:q} scaling --output {output.law:q}"
