"""Checkpoints to numbers: score each stage on held-out text, sample from it, draw figures, compare all stages.

Held-out text is compared with the training text, and coded by compressors, beside the training and without a GPU.
Scoring, sampling and drawing are separate, so another prompt or a lost figure scores no checkpoint again. The job
that scores the end of a stage also scores its checkpoints on the way, because another one would have to start and
load torch. Drawing reads JSON files, and uses no torch and no GPU.
"""


rule overlap:
    input:
        plan.texts_of(overlap_name),
    output:
        "<results>/overlap/{scored}.json",
    log:
        "<logs>/overlap/{scored}.log",
    benchmark:
        "<benchmarks>/overlap/overlap/{scored}.tsv"
    # What evaluations wait for comes before them.
    priority: 1
    params:
        spider=command,
    shell:
        "{params.spider} --log {log:q} overlap {wildcards.scored}"


rule baselines:
    input:
        plan.texts_of(baselines_name),
        overlap=plan.overlap_of,
    output:
        "<results>/baselines/{scored}.json",
    log:
        "<logs>/baselines/{scored}.log",
    benchmark:
        "<benchmarks>/baselines/baselines/{scored}.tsv"
    priority: 1
    resources:
        mem_mb=growing(3000),
    params:
        spider=command,
    shell:
        "{params.spider} --log {log:q} baselines {wildcards.scored}"


rule stage_baselines:
    input:
        receipt="<results>/runs/{run}/{stage}/train.json",
        overlap=plan.overlap_of,
        shared=plan.shared_baselines,
    output:
        "<results>/runs/{run}/{stage}/baselines.json",
    log:
        "<logs>/stage_baselines/{run}/{stage}.log",
    benchmark:
        "<benchmarks>/stage_baselines/runs/{run}/{stage}/baselines.tsv"
    resources:
        mem_mb=growing(3000),
    params:
        spider=command,
    shell:
        "{params.spider} --log {log:q} baselines {wildcards.run}/{wildcards.stage} --of-stage"


rule evaluate:
    input:
        receipt=plan.receipt,
        data=plan.scored_data,
        ngram=plan.indexes("split", "full"),
        tasks=plan.task_files,
        overlap=plan.overlap_of,
    output:
        "<results>/runs/{run}/{stage}/evaluation.json",
        "<results>/runs/{run}/{stage}/checkpoints.json",
    log:
        "<logs>/evaluate/{run}/{stage}.log",
    benchmark:
        "<benchmarks>/evaluate/runs/{run}/{stage}/evaluation.tsv"
    threads: plan.of_run("threads")
    resources:
        gpu=plan.of_run("gpu"),
        mem_mb=plan.of_run("mem_mb"),
    params:
        spider=command,
        identity=lambda wildcards: plan.stage_of(wildcards).evaluation.scoring(),
        compressed="",
    shell:
        "{params.spider} --log {log:q} evaluate {wildcards.run}/{wildcards.stage} {params.compressed} "
        "--threads {threads}"


use rule evaluate as evaluate_compressed with:
    output:
        "<results>/runs/{run}/{stage}{compressed}/evaluation.json",
    log:
        "<logs>/evaluate/{run}/{stage}{compressed}.log",
    benchmark:
        "<benchmarks>/evaluate/runs/{run}/{stage}{compressed}/evaluation.tsv"
    wildcard_constraints:
        compressed="[/]compressed",
    params:
        spider=command,
        identity=lambda wildcards: plan.stage_of(wildcards).evaluation.scoring(),
        compressed="--compressed",


rule evaluate_foreign:
    input:
        model=plan.foreign_files,
        data=lambda wildcards: plan.metadata(plan.foreign_spec(wildcards).evaluation.data),
        tasks=lambda wildcards: plan.task_files(plan.foreign_spec(wildcards)),
    output:
        "<results>/foreign/{run}/evaluation.json",
    log:
        "<logs>/evaluate_foreign/{run}.log",
    benchmark:
        "<benchmarks>/evaluate_foreign/foreign/{run}/evaluation.tsv"
    threads: plan.of_run("threads")
    resources:
        gpu=plan.of_run("gpu"),
        mem_mb=plan.of_run("mem_mb"),
    params:
        spider=command,
        identity=lambda wildcards: plan.foreign_spec(wildcards).evaluation.foreign_scoring(),
    shell:
        "{params.spider} --log {log:q} evaluate --model {wildcards.run} --threads {threads}"


rule sample:
    input:
        receipt=plan.receipt,
        ngram=plan.indexes("full"),
    output:
        "<results>/runs/{run}/{stage}{compressed}/sample.json",
        shown("runs/{run}/{stage}{compressed}/sample.txt", "Samples", "generated text"),
    log:
        "<logs>/sample/{run}/{stage}{compressed}.log",
    benchmark:
        "<benchmarks>/sample/runs/{run}/{stage}{compressed}/sample.tsv"
    threads: plan.of_run("threads")
    resources:
        gpu=plan.of_run("gpu"),
        mem_mb=plan.of_run("mem_mb"),
    params:
        spider=command,
        identity=lambda wildcards: plan.stage_of(wildcards).evaluation.sampling(),
        compressed=lambda wildcards: "--compressed" if wildcards.compressed else "",
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
    params:
        spider=command,
    shell:
        "{params.spider} --log {log:q} report draw {wildcards.run}/{wildcards.stage}"


rule compare:
    input:
        lambda wildcards: plan.scores(*CONFIG.shown),
        expand("<results>/foreign/{name}/evaluation.json", name=CONFIG.foreign),
    output:
        shown("report/table.md", "Comparison", "bits per byte, table"),
        shown("report/bpb.svg", "Comparison", "bits per byte over bytes trained"),
        summary="<results>/report/summary.json",
    log:
        "<logs>/compare.log",
    benchmark:
        "<benchmarks>/compare/report/table.tsv"
    localrule: True
    resources:
        **requested(lambda wildcards: plan.requests.showing(*CONFIG.shown)),
    params:
        spider=command,
    shell:
        "{params.spider} --log {log:q} report compare --output {output.summary:q}"
