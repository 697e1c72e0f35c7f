"""Checkpoints to numbers: score each stage on held-out text, let it write, draw figures, compare all stages.

Scoring, sampling and drawing are three rules: another prompt or a lost figure scores no checkpoint again.
Drawing reads JSON files only, and needs neither torch nor a GPU.
"""


rule evaluate:
    input:
        receipt="<results>/runs/{run}/{stage}/train.json",
        data=lambda wildcards: metadata(stage_spec(wildcards).evaluation.data),
        ngram=indexes("full"),
        tasks=task_files,
    output:
        "<results>/runs/{run}/{stage}/evaluation.json",
    log:
        "<logs>/evaluate/{run}/{stage}.log",
    benchmark:
        "<benchmarks>/evaluate/{run}/{stage}.tsv"
    threads: job_resource("threads")
    resources:
        gpu=one_gpu,
        mem_mb=job_resource("mem_mb"),
        runtime=longer(30),
    params:
        spider=command,
        identity=scoring,
    shell:
        "{params.spider} --log {log:q} evaluate {wildcards.run}/{wildcards.stage} --threads {threads}"


rule sample:
    input:
        receipt="<results>/runs/{run}/{stage}/train.json",
        ngram=indexes("full"),
    output:
        "<results>/runs/{run}/{stage}/sample.json",
        shown("runs/{run}/{stage}/sample.txt", "Samples", "generated text"),
    log:
        "<logs>/sample/{run}/{stage}.log",
    benchmark:
        "<benchmarks>/sample/{run}/{stage}.tsv"
    threads: job_resource("threads")
    resources:
        gpu=one_gpu,
        mem_mb=job_resource("mem_mb"),
        runtime=longer(30),
    params:
        spider=command,
        identity=lambda wildcards: stage_spec(wildcards).evaluation.sampling(),
    shell:
        "{params.spider} --log {log:q} sample {wildcards.run}/{wildcards.stage} --threads {threads}"


rule draw:
    input:
        "<results>/runs/{run}/{stage}/evaluation.json",
        "<results>/runs/{run}/{stage}/train.json",
    output:
        shown("runs/{run}/{stage}/loss.svg", "Training", "loss curve"),
        shown("runs/{run}/{stage}/inside.svg", "Inside the model", "inside the model"),
        shown("runs/{run}/{stage}/boundaries.html", "Inside the model", "text as the model cuts it"),
    log:
        "<logs>/draw/{run}/{stage}.log",
    benchmark:
        "<benchmarks>/draw/{run}/{stage}.tsv"
    resources:
        mem_mb=2000,
        runtime=longer(10),
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
        "<benchmarks>/harness/{run}/{stage}.tsv"
    threads: job_resource("threads")
    resources:
        gpu=one_gpu,
        mem_mb=job_resource("mem_mb"),
        runtime=longer(120),
    params:
        spider=command,
        options=harness_options,
    shell:
        "{params.spider} --log {log:q} harness {input.receipt:q} {params.options} --threads {threads} --output {output:q}"


rule compare:
    input:
        evaluations(CONFIG.runs),
        samples(CONFIG.runs),
        compressed(CONFIG.runs, "evaluation.json"),
    output:
        "<results>/report/table.md",
        shown("report/table.html", "Comparison", "bits per byte, table"),
        shown("report/bpb.svg", "Comparison", "bits per byte by stage"),
        shown("report/loss.svg", "Comparison", "loss curves of all runs"),
        summary="<results>/report/summary.json",
    log:
        "<logs>/compare.log",
    benchmark:
        "<benchmarks>/compare/compare.tsv"
    resources:
        mem_mb=2000,
        runtime=longer(10),
    params:
        spider=command,
    shell:
        "{params.spider} --log {log:q} report compare --output {output.summary:q}"
