"""Checkpoint to one small file. The rules evaluate and sample read it as they read a checkpoint."""


rule compress:
    input:
        receipt="<results>/runs/{run}/{stage}/train.json",
        data=lambda wildcards: plan.metadata(plan.stage_of(wildcards).data),
    output:
        "<results>/runs/{run}/{stage}/compressed/model.spider",
        "<results>/runs/{run}/{stage}/compressed/compress.json",
    log:
        "<logs>/compress/{run}/{stage}.log",
    benchmark:
        "<benchmarks>/compress/runs/{run}/{stage}/compressed/model.tsv"
    threads: plan.of_run("threads")
    resources:
        gpu=plan.of_run("gpu"),
        mem_mb=plan.of_run("mem_mb"),
    params:
        spider=command,
        identity=plan.compress_identity,
    shell:
        "{params.spider} --log {log:q} compress {wildcards.run}/{wildcards.stage} --threads {threads}"
