"""Scores to audits, samples to traces, and the index of the training text that a trace searches.

`audit:` names the runs whose last stage is audited. A check that fails stops nothing: the job logs a warning, and the
views show the failure. `trace:` names the datasets whose training text is indexed. The sample of each stage is traced
that has learned from such text alone.
"""


include: "inputs.smk"


plan.measured_by.append(lambda run: audits(run) + traces(run))


rule audit:
    input:
        receipt=plan.receipt,
        evaluation="<results>/runs/{run}/{stage}{compressed}/evaluation.json",
        data=audited_data,
        ngram=plan.indexes("split", "full"),
        tasks=plan.task_files,
    output:
        "<results>/runs/{run}/{stage}{compressed}/audit.json",
    log:
        "<logs>/audit/{run}/{stage}{compressed}.log",
    benchmark:
        "<benchmarks>/audit/runs/{run}/{stage}{compressed}/audit.tsv"
    threads: plan.of_run("threads")
    resources:
        gpu=plan.of_run("gpu"),
        mem_mb=plan.of_run("mem_mb"),
        # A whole audit scores the text again and trains a stretch of the stage.
        runtime=growing(plan.of_run("runtime")),
    params:
        spider=command,
        options=audit_options,
    shell:
        "{params.spider} --log {log:q} audit {wildcards.run}/{wildcards.stage} {params.options} --warn "
        "--threads {threads} --output {output:q}"


rule index_text:
    input:
        plan.shards,
    output:
        "<results>/text/{dataset}/{part}.json",
    log:
        "<logs>/index_text/{dataset}/{part}.log",
    benchmark:
        "<benchmarks>/index_text/text/{dataset}/{part}.tsv"
    resources:
        mem_mb=growing(lambda wildcards: round(400 + 8 * megabytes(wildcards))),
        runtime=growing(lambda wildcards: 30 + round(megabytes(wildcards) / 120)),
    params:
        spider=command,
    shell:
        "{params.spider} --log {log:q} data index-text {wildcards.dataset} {wildcards.part} --output {output:q}"


rule trace:
    input:
        "<results>/runs/{run}/{stage}/sample.json",
        text=learned_texts,
    output:
        "<results>/runs/{run}/{stage}/trace.json",
    log:
        "<logs>/trace/{run}/{stage}.log",
    benchmark:
        "<benchmarks>/trace/runs/{run}/{stage}/trace.tsv"
    params:
        spider=command,
    shell:
        "{params.spider} --log {log:q} trace {wildcards.run}/{wildcards.stage} --output {output:q}"


# Targets for the index of the training text of each stored dataset.
for name in [name for name, dataset in CONFIG.datasets.items() if not dataset.source.STREAMED]:

    rule:
        name:
            f"text/{name}"
        input:
            text_indexes(name),
