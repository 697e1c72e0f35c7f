"""Finished runs of a ladder to a forecast, which larger runs need before they start."""


rule forecast:
    input:
        lambda wildcards: expand(
            "{folder}/evaluation.json", folder=stage_folders(*CONFIG.rungs[wildcards.ladder].rungs)
        ),
    output:
        "<results>/ladders/{ladder}/forecast.json",
    log:
        "<logs>/forecast/{ladder}.log",
    benchmark:
        "<benchmarks>/forecast/ladders/{ladder}/forecast.tsv"
    localrule: True
    resources:
        mem_mb=growing(2000),
        runtime=growing(10),
    params:
        spider=command,
        at=lambda wildcards: CONFIG.forecast_at(wildcards.ladder),
    shell:
        "{params.spider} --log {log:q} report forecast {wildcards.ladder}"
