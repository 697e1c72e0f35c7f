"""Shards to checkpoints: measure each shape of a run once, then train stage after stage.

Only what decides the weights may train a stage again: its resolved settings (params), its data and the stage
before it (inputs). Checkpoints and metrics lie beside the receipt, undeclared, so that a failed or killed job
keeps them and the next one goes on from there. A warm-up is named by the digest of what it measures: a new
stage of a known shape needs none, and one of a new shape leaves the others' alone.
"""


rule warmup:
    output:
        "<results>/runs/{run}/warmup-{shape}.json",
    log:
        "<logs>/warmup/{run}-{shape}.log",
    benchmark:
        "<benchmarks>/warmup/{run}/{shape}.tsv"
    threads: job_resource("threads")
    resources:
        gpu=one_gpu,
        mem_mb=job_resource("mem_mb"),
        # On a GPU it compiles: the step in each candidate, and every product in fp8.
        runtime=lambda wildcards, attempt: longer(90 if all_gpus(wildcards) else 30)(wildcards, attempt),
    params:
        spider=command,
        stage=lambda w: next(s for s in stages(w.run) if CONFIG.stage(w.run, s).shape == w.shape),
    shell:
        "{params.spider} --log {log:q} warmup {wildcards.run}/{params.stage} --threads {threads}"


rule train:
    input:
        data=lambda wildcards: metadata(stage_spec(wildcards).data),
        packed=packed_rows,
        previous=previous_receipt,
        indexes=indexes("split", "full"),
        warmup=lambda wildcards: f"<results>/runs/{wildcards.run}/warmup-{stage_spec(wildcards).shape}.json",
    output:
        "<results>/runs/{run}/{stage}/train.json",
    log:
        "<logs>/train/{run}/{stage}.log",
    benchmark:
        "<benchmarks>/train/{run}/{stage}.tsv"
    threads: job_resource("threads")
    resources:
        gpu=all_gpus,
        mem_mb=job_resource("mem_mb"),
        # A later attempt goes on from the last checkpoint of the one before.
        runtime=lambda wildcards, attempt: attempt * job_resource("runtime")(wildcards),
        processes=job_resource("processes"),
        nodes=job_resource("nodes"),
        # In the words of Snakemake's Slurm executor: one task on each node, which the job starts itself.
        mpi=lambda wildcards: several_nodes(wildcards) and "srun",
        tasks=several_nodes,
        tasks_per_gpu=lambda wildcards: several_nodes(wildcards) and 0,
    params:
        spider=command,
        identity=lambda wildcards: stage_spec(wildcards).identity,
    shell:
        "{params.spider} --log {log:q} train {wildcards.run}/{wildcards.stage} --wait "
        "--threads {threads} --processes {resources.processes} --nodes {resources.nodes}"
