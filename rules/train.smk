"""Shards to checkpoints: measure once a run, then train stage after stage.

Only what decides the weights may train a stage again: its resolved settings (params), its data and the stage
before it (inputs). Checkpoints and metrics lie beside the receipt, undeclared, so that a failed or killed job
keeps them and the next one goes on from there. The warm-up's timings differ from time to time and are
therefore `ancient`: they inform a stage, they never retrain it.
"""


rule warmup:
    output:
        "<results>/runs/{run}/warmup.json",
    log:
        "<logs>/warmup/{run}.log",
    benchmark:
        "<benchmarks>/warmup/{run}.tsv"
    threads: job_resource("threads")
    resources:
        gpus=job_resource("gpus"),
        mem_mb=job_resource("mem_mb"),
        runtime=30,
    params:
        identity=warmup_identity,
    shell:
        "spider --config {SNAPSHOT:q} --log {log:q} warmup {wildcards.run} --threads {threads} --output {output:q}"


rule train:
    input:
        data=lambda wildcards: metadata(stage_spec(wildcards).data),
        previous=previous_receipt,
        warmup=ancient("<results>/runs/{run}/warmup.json"),
    output:
        "<results>/runs/{run}/{stage}/train.json",
    log:
        "<logs>/train/{run}/{stage}.log",
    benchmark:
        "<benchmarks>/train/{run}-{stage}.tsv"
    threads: job_resource("threads")
    resources:
        gpus=job_resource("gpus"),
        mem_mb=job_resource("mem_mb"),
        runtime=job_resource("runtime"),
    params:
        identity=lambda wildcards: stage_spec(wildcards).identity,
    shell:
        "spider --config {SNAPSHOT:q} --log {log:q} train {wildcards.run} {wildcards.stage} --threads {threads} --output {output:q}"
