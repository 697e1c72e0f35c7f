"""Shards to checkpoints: measure once a run, then train stage after stage.

Only what decides the weights may train a stage again: its resolved settings (params), its data and the stage
before it (inputs). Checkpoints and metrics lie beside the receipt, undeclared, so that a failed or killed job
keeps them and the next one goes on from there. The warm-up's timings differ from time to time and are
therefore `ancient`: they inform a stage, they never retrain it.
"""


rule warmup:
    output:
        "<results>/runs/{run}/warmup.json",
    params:
        identity=lambda wildcards: [CONFIG.stage(wildcards.run, s).shapes() for s in stages(wildcards.run)],
    log:
        "<logs>/warmup/{run}.log",
    benchmark:
        "<benchmarks>/warmup/{run}.tsv"
    threads: job_resource("threads")
    resources:
        gpus=job_resource("gpus"),
        mem_mb=job_resource("mem_mb"),
        runtime=30,
    shell:
        f"{SPIDER} warmup {{wildcards.run}} --threads {{threads}} --output {{output:q}}"


rule train:
    input:
        data=lambda wildcards: metadata(CONFIG.stage(wildcards.run, wildcards.stage).data),
        previous=previous_receipt,
        warmup=ancient("<results>/runs/{run}/warmup.json"),
    output:
        "<results>/runs/{run}/{stage}/train.json",
    params:
        identity=lambda wildcards: CONFIG.stage(wildcards.run, wildcards.stage).identity,
    log:
        "<logs>/train/{run}/{stage}.log",
    benchmark:
        "<benchmarks>/train/{run}-{stage}.tsv"
    threads: job_resource("threads")
    resources:
        gpus=job_resource("gpus"),
        mem_mb=job_resource("mem_mb"),
        runtime=job_resource("runtime"),
    shell:
        f"{SPIDER} train {{wildcards.run}} {{wildcards.stage}} --threads {{threads}} --output {{output:q}}"
