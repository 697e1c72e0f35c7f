"""Checkpoints to numbers: score each stage on held-out text, then set them side by side."""


rule evaluate:
    input:
        receipt="<results>/runs/{run}/{stage}/train.json",
        data=lambda wildcards: metadata(stage_spec(wildcards).evaluation.data),
    output:
        "<results>/runs/{run}/{stage}/evaluation.json",
        report(
            "<results>/runs/{run}/{stage}/loss.svg",
            caption="captions/loss.rst",
            category="Training",
            subcategory="{run}",
            labels={"stage": "{stage}", "what": "loss curve"},
        ),
        report(
            "<results>/runs/{run}/{stage}/loops.svg",
            caption="captions/loops.rst",
            category="Inside the model",
            subcategory="{run}",
            labels={"stage": "{stage}", "what": "bits per byte against loops"},
        ),
        report(
            "<results>/runs/{run}/{stage}/inside.svg",
            caption="captions/inside.rst",
            category="Inside the model",
            subcategory="{run}",
            labels={"stage": "{stage}", "what": "inside the model"},
        ),
        report(
            "<results>/runs/{run}/{stage}/boundaries.html",
            caption="captions/boundaries.rst",
            category="Inside the model",
            subcategory="{run}",
            labels={"stage": "{stage}", "what": "text as the model cuts it"},
        ),
        report(
            "<results>/runs/{run}/{stage}/sample.txt",
            caption="captions/sample.rst",
            category="Samples",
            subcategory="{run}",
            labels={"stage": "{stage}", "what": "generated text"},
        ),
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


rule compare:
    input:
        evaluations(CONFIG.runs),
    output:
        "<results>/report/table.md",
        report(
            "<results>/report/table.html",
            caption="captions/table.rst",
            category="Comparison",
            labels={"what": "bits per byte, table"},
        ),
        report(
            "<results>/report/bpb.svg",
            caption="captions/bpb.rst",
            category="Comparison",
            labels={"what": "bits per byte by stage"},
        ),
        report(
            "<results>/report/loss.svg",
            caption="captions/loss.rst",
            category="Comparison",
            labels={"what": "loss curves of all runs"},
        ),
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
