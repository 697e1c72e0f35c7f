"""Shards to checkpoints: measure each shape of a run once, then train stage after stage.

Only three things may train a stage again: its resolved settings (params), its data and the stage before it (inputs).
Checkpoints and metrics lie beside the receipt and are no outputs, so a failed or killed job keeps them and the next one
resumes. The name of a warm-up has a digest of what it measures: a new stage of a known shape needs none, and one of a
new shape leaves the others alone.
"""


rule warmup:
    input:
        packed=plan.rows_with_documents,
    output:
        "<results>/runs/{run}/warmup-{shape}.json",
    log:
        "<logs>/warmup/{run}-{shape}.log",
    benchmark:
        "<benchmarks>/warmup/runs/{run}/warmup-{shape}.tsv"
    priority: 1
    threads: plan.of_run("threads")
    resources:
        gpu=plan.of_run("gpu"),
        mem_mb=plan.of_run("mem_mb"),
    params:
        spider=command,
        stage=lambda wildcards: plan.measured_stage(wildcards).stage,
        settings=plan.shape_settings,
    shell:
        "{params.spider} --log {log:q} warmup {wildcards.run}/{params.stage} --threads {threads}"


rule train:
    input:
        data=plan.training_data,
        packed=plan.packed_rows,
        previous=plan.previous_receipt,
        indexes=plan.indexes("split", "full"),
        warmup=plan.warmup,
    output:
        "<results>/runs/{run}/{stage}/train.json",
    log:
        "<logs>/train/{run}/{stage}.log",
    benchmark:
        "<benchmarks>/train/runs/{run}/{stage}/train.tsv"
    priority: 1
    threads: plan.of_run("threads")
    resources:
        **plan.of_nodes(),
        gpu=plan.of_run("gpus"),
        mem_mb=plan.of_run("mem_mb"),
        # The next attempt resumes from the last checkpoint.
        runtime=growing(plan.of_run("runtime")),
        processes=plan.of_run("processes"),
        nodes=plan.of_run("nodes"),
    params:
        spider=command,
        identity=lambda wildcards: plan.stage_of(wildcards).identity,
        settings=plan.stage_settings,
    shell:
        "{params.spider} --log {log:q} train {wildcards.run}/{wildcards.stage} --wait "
        "--threads {threads} --processes {resources.processes} --nodes {resources.nodes}"
