"""Checkpoints to numbers: score each stage on held-out text, sample from it, draw figures, compare all stages.

Held-out text is compared with the training text, and coded by compressors, beside the training and without a GPU.
A stage and its compressed model share the rules evaluate and sample. Scoring, sampling and drawing are separate, so
another prompt or a lost figure scores no checkpoint again. The kept checkpoints before the end of a stage have a rule
of their own. Drawing reads JSON files, and uses no torch and no GPU.
"""


rule overlap:
    input:
        texts_of(overlap_name),
    output:
        "<results>/overlap/{scored}.json",
    log:
        "<logs>/overlap/{scored}.log",
    benchmark:
        "<benchmarks>/overlap/overlap/{scored}.tsv"
    # What evaluations wait for comes before them.
    priority: 1
    resources:
        mem_mb=growing(2000),
        runtime=growing(30),
    params:
        spider=command,
    shell:
        "{params.spider} --log {log:q} overlap {wildcards.scored}"


rule baselines:
    input:
        texts_of(baselines_name),
        overlap=overlap_of,
    output:
        "<results>/baselines/{scored}.json",
    log:
        "<logs>/baselines/{scored}.log",
    benchmark:
        "<benchmarks>/baselines/baselines/{scored}.tsv"
    priority: 1
    resources:
        mem_mb=growing(3000),
        runtime=growing(120),
    params:
        spider=command,
    shell:
        "{params.spider} --log {log:q} baselines {wildcards.scored}"


rule stage_baselines:
    input:
        receipt="<results>/runs/{run}/{stage}/train.json",
        overlap=overlap_of,
        shared=lambda wildcards: f"<results>/baselines/{baselines_name(CONFIG, stage_spec(wildcards))}.json",
    output:
        "<results>/runs/{run}/{stage}/baselines.json",
    log:
        "<logs>/stage_baselines/{run}/{stage}.log",
    benchmark:
        "<benchmarks>/stage_baselines/runs/{run}/{stage}/baselines.tsv"
    resources:
        mem_mb=growing(3000),
        runtime=growing(60),
    params:
        spider=command,
    shell:
        "{params.spider} --log {log:q} baselines {wildcards.run}/{wildcards.stage} --of-stage"


rule evaluate:
    input:
        receipt=receipt,
        data=scored_data,
        ngram=indexes("split", "full"),
        tasks=task_files,
        # Settings of compressors change neither this path nor, by its time, the scores.
        overlap=lambda wildcards: ancient(overlap_of(wildcards)),
    output:
        "<results>/runs/{run}/{stage}{compressed}/evaluation.json",
    log:
        "<logs>/evaluate/{run}/{stage}{compressed}.log",
    benchmark:
        "<benchmarks>/evaluate/runs/{run}/{stage}{compressed}/evaluation.tsv"
    threads: lookup(dpath="{run}/threads", within=RESOURCES)
    resources:
        gpu=one_gpu,
        mem_mb=lookup(dpath="{run}/mem_mb", within=RESOURCES),
        runtime=growing(30),
    params:
        spider=command,
        identity=lambda wildcards: stage_spec(wildcards).evaluation.scoring(),
        compressed=compressed_option,
    shell:
        "{params.spider} --log {log:q} evaluate {wildcards.run}/{wildcards.stage} {params.compressed} "
        "--threads {threads}"


rule evaluate_foreign:
    input:
        model=foreign_files,
        data=lambda wildcards: metadata(foreign_spec(wildcards).evaluation.data),
        tasks=lambda wildcards: task_files(foreign_spec(wildcards)),
    output:
        "<results>/foreign/{run}/evaluation.json",
    log:
        "<logs>/evaluate_foreign/{run}.log",
    benchmark:
        "<benchmarks>/evaluate_foreign/foreign/{run}/evaluation.tsv"
    threads: lookup(dpath="{run}/threads", within=RESOURCES)
    resources:
        gpu=one_gpu,
        mem_mb=lookup(dpath="{run}/mem_mb", within=RESOURCES),
        runtime=growing(60),
    params:
        spider=command,
        identity=lambda wildcards: CONFIG.foreign[wildcards.run].scoring(foreign_spec(wildcards).evaluation),
    shell:
        "{params.spider} --log {log:q} evaluate --model {wildcards.run} --threads {threads}"


rule evaluate_checkpoints:
    input:
        receipt="<results>/runs/{run}/{stage}/train.json",
        data=lambda wildcards: metadata(stage_spec(wildcards).evaluation.data),
        ngram=indexes("full"),
    output:
        "<results>/runs/{run}/{stage}/checkpoints.json",
    log:
        "<logs>/evaluate_checkpoints/{run}/{stage}.log",
    benchmark:
        "<benchmarks>/evaluate_checkpoints/runs/{run}/{stage}/checkpoints.tsv"
    threads: lookup(dpath="{run}/threads", within=RESOURCES)
    resources:
        gpu=one_gpu,
        mem_mb=lookup(dpath="{run}/mem_mb", within=RESOURCES),
        # The next attempt scores only the checkpoints that are left.
        runtime=growing(60),
    params:
        spider=command,
        identity=lambda wildcards: stage_spec(wildcards).evaluation.checkpoint_scoring(),
    shell:
        "{params.spider} --log {log:q} evaluate-checkpoints {wildcards.run}/{wildcards.stage} --threads {threads}"


rule sample:
    input:
        receipt=receipt,
        ngram=indexes("full"),
    output:
        "<results>/runs/{run}/{stage}{compressed}/sample.json",
        shown("runs/{run}/{stage}{compressed}/sample.txt", "Samples", "generated text"),
    log:
        "<logs>/sample/{run}/{stage}{compressed}.log",
    benchmark:
        "<benchmarks>/sample/runs/{run}/{stage}{compressed}/sample.tsv"
    threads: lookup(dpath="{run}/threads", within=RESOURCES)
    resources:
        gpu=one_gpu,
        mem_mb=lookup(dpath="{run}/mem_mb", within=RESOURCES),
        runtime=growing(30),
    params:
        spider=command,
        identity=lambda wildcards: stage_spec(wildcards).evaluation.sampling(),
        compressed=compressed_option,
    shell:
        "{params.spider} --log {log:q} sample {wildcards.run}/{wildcards.stage} {params.compressed} "
        "--threads {threads}"


rule draw:
    input:
        "<results>/runs/{run}/{stage}/evaluation.json",
        "<results>/runs/{run}/{stage}/train.json",
    output:
        shown("runs/{run}/{stage}/loss.svg", "Training", "loss curve"),
        shown("runs/{run}/{stage}/inside.svg", "Inside the model", "inside the model"),
        shown("runs/{run}/{stage}/boundaries.html", "Inside the model", "text in the patches of the model"),
    log:
        "<logs>/draw/{run}/{stage}.log",
    benchmark:
        "<benchmarks>/draw/runs/{run}/{stage}/loss.tsv"
    localrule: True
    resources:
        mem_mb=growing(2000),
        runtime=growing(10),
    params:
        spider=command,
    shell:
        "{params.spider} --log {log:q} report draw {wildcards.run}/{wildcards.stage}"


rule harness:
    input:
        receipt="<results>/runs/{run}/{stage}/train.json",
        ngram=indexes("full"),
        tasks=harness_files,
    output:
        "<results>/runs/{run}/{stage}/harness.json",
    log:
        "<logs>/harness/{run}/{stage}.log",
    benchmark:
        "<benchmarks>/harness/runs/{run}/{stage}/harness.tsv"
    threads: lookup(dpath="{run}/threads", within=RESOURCES)
    resources:
        gpu=one_gpu,
        mem_mb=lookup(dpath="{run}/mem_mb", within=RESOURCES),
        runtime=growing(120),
    params:
        spider=command,
        options=harness_options,
    shell:
        "{params.spider} --log {log:q} harness {input.receipt:q} {params.options} --threads {threads} --output {output:q}"


rule compare:
    input:
        scores(*CONFIG.shown),
        lambda wildcards: further(*CONFIG.shown),
        expand("<results>/foreign/{name}/evaluation.json", name=CONFIG.foreign),
    output:
        shown("report/table.md", "Comparison", "bits per byte, table"),
        shown("report/bpb.svg", "Comparison", "bits per byte by stage"),
        summary="<results>/report/summary.json",
    log:
        "<logs>/compare.log",
    benchmark:
        "<benchmarks>/compare/report/table.tsv"
    localrule: True
    resources:
        mem_mb=growing(2000),
        runtime=growing(10),
    params:
        spider=command,
    shell:
        "{params.spider} --log {log:q} report compare --output {output.summary:q}"
