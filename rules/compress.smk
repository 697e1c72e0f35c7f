"""A trained model compressed into one small file, which is scored and writes a sample as its checkpoint does."""


rule compress:
    input:
        receipt="<results>/runs/{run}/{stage}/train.json",
        data=lambda wildcards: metadata(stage_spec(wildcards).data),
    output:
        "<results>/runs/{run}/{stage}/compressed/model.spider",
        "<results>/runs/{run}/{stage}/compressed/compress.json",
    log:
        "<logs>/compress/{run}/{stage}.log",
    benchmark:
        "<benchmarks>/compress/{run}/{stage}.tsv"
    threads: job_resource("threads")
    resources:
        gpu=one_gpu,
        mem_mb=job_resource("mem_mb"),
        runtime=longer(60),
    params:
        spider=command,
        identity=compress_identity,
    shell:
        "{params.spider} --log {log:q} compress {wildcards.run}/{wildcards.stage} --threads {threads}"


rule evaluate_compressed:
    input:
        receipt="<results>/runs/{run}/{stage}/compressed/compress.json",
        data=lambda wildcards: metadata(stage_spec(wildcards).evaluation.data),
        tasks=task_files,
    output:
        "<results>/runs/{run}/{stage}/compressed/evaluation.json",
    log:
        "<logs>/evaluate_compressed/{run}/{stage}.log",
    benchmark:
        "<benchmarks>/evaluate_compressed/{run}/{stage}.tsv"
    threads: job_resource("threads")
    resources:
        gpu=one_gpu,
        mem_mb=job_resource("mem_mb"),
        runtime=longer(30),
    params:
        spider=command,
        identity=scoring,
    shell:
        "{params.spider} --log {log:q} evaluate {wildcards.run}/{wildcards.stage} --compressed --threads {threads}"


rule sample_compressed:
    input:
        "<results>/runs/{run}/{stage}/compressed/compress.json",
    output:
        "<results>/runs/{run}/{stage}/compressed/sample.json",
        shown("runs/{run}/{stage}/compressed/sample.txt", "Samples", "generated text, compressed model"),
    log:
        "<logs>/sample_compressed/{run}/{stage}.log",
    benchmark:
        "<benchmarks>/sample_compressed/{run}/{stage}.tsv"
    threads: job_resource("threads")
    resources:
        gpu=one_gpu,
        mem_mb=job_resource("mem_mb"),
        runtime=longer(30),
    params:
        spider=command,
        identity=lambda wildcards: stage_spec(wildcards).evaluation.sampling(),
    shell:
        "{params.spider} --log {log:q} sample {wildcards.run}/{wildcards.stage} --compressed --threads {threads}"
