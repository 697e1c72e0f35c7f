"""Checkpoints to numbers: score each stage on held-out text, then set them side by side."""


rule evaluate:
    input:
        receipt="<results>/runs/{run}/{stage}/train.json",
        data=lambda wildcards: metadata(stage_spec(wildcards).evaluation.data),
        memory=memories("folded"),
        tasks=task_files,
    output:
        "<results>/runs/{run}/{stage}/evaluation.json",
        shown("runs/{run}/{stage}/loss.svg", "Training", "loss curve"),
        shown("runs/{run}/{stage}/loops.svg", "Inside the model", "bits per byte against loops"),
        shown("runs/{run}/{stage}/inside.svg", "Inside the model", "inside the model"),
        shown("runs/{run}/{stage}/boundaries.html", "Inside the model", "text as the model cuts it"),
        shown("runs/{run}/{stage}/sample.txt", "Samples", "generated text"),
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
        identity=lambda wildcards: stage_spec(wildcards).evaluation.changed(),
    shell:
        "{params.spider} --log {log:q} evaluate {wildcards.run} {wildcards.stage} --threads {threads}"


rule harness:
    input:
        receipt="<results>/runs/{run}/{stage}/train.json",
        memory=memories("folded"),
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
        artifacts(CONFIG.runs),
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
        "{params.spider} --log {log:q} compare --output {output.summary:q}"
