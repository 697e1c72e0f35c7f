"""Shards to checkpoints: measure each shape of a run once, then train stage after stage.

Only three things may train a stage again: its resolved settings (params), its data and the stage before it (inputs).
Checkpoints and metrics lie beside the receipt and are no outputs, so a failed or killed job keeps them and the next one
resumes. The name of a warm-up has a digest of what it measures: a new stage of a known shape needs none, and one of a
new shape leaves the others alone.
"""


rule warmup:
    input:
        packed=rows_with_documents,
    output:
        "<results>/runs/{run}/warmup-{shape}.json",
    log:
        "<logs>/warmup/{run}-{shape}.log",
    benchmark:
        "<benchmarks>/warmup/runs/{run}/warmup-{shape}.tsv"
    priority: 1
    threads: lookup(dpath="{run}/threads", within=RESOURCES)
    resources:
        gpu=one_gpu,
        mem_mb=lookup(dpath="{run}/mem_mb", within=RESOURCES),
        # On a GPU it compiles each candidate for the step, and every matrix product in fp8.
        runtime=growing(branch(all_gpus, then=90, otherwise=30)),
    params:
        spider=command,
        stage=lambda wildcards: measured_stage(wildcards).stage,
        settings=shape_settings,
    shell:
        "{params.spider} --log {log:q} warmup {wildcards.run}/{params.stage} --threads {threads}"


rule train:
    input:
        data=training_data,
        packed=packed_rows,
        previous=previous_receipt,
        indexes=indexes("split", "full"),
        warmup=lambda wildcards: f"<results>/runs/{wildcards.run}/warmup-{stage_spec(wildcards).shape}.json",
    output:
        "<results>/runs/{run}/{stage}/train.json",
    log:
        "<logs>/train/{run}/{stage}.log",
    benchmark:
        "<benchmarks>/train/runs/{run}/{stage}/train.tsv"
    priority: 1
    threads: lookup(dpath="{run}/threads", within=RESOURCES)
    resources:
        gpu=all_gpus,
        mem_mb=lookup(dpath="{run}/mem_mb", within=RESOURCES),
        # The next attempt resumes from the last checkpoint.
        runtime=growing(lookup(dpath="{run}/runtime", within=RESOURCES)),
        processes=lookup(dpath="{run}/processes", within=RESOURCES),
        nodes=lookup(dpath="{run}/nodes", within=RESOURCES),
        # For Snakemake's Slurm executor: one task on each node, which the job starts itself.
        mpi=lambda wildcards: several_nodes(wildcards) and "srun",
        tasks=several_nodes,
        tasks_per_gpu=lambda wildcards: several_nodes(wildcards) and 0,
    params:
        spider=command,
        identity=lambda wildcards: stage_spec(wildcards).identity,
        settings=stage_settings,
    shell:
        "{params.spider} --log {log:q} train {wildcards.run}/{wildcards.stage} --wait "
        "--threads {threads} --processes {resources.processes} --nodes {resources.nodes}"
