"""Scores to audits: try to disprove the score of the last stage of a run, where the run has `audit:`.

A check that fails stops nothing. The job logs a warning, and the comparison and the pages show the failure.
"""


rule audit:
    input:
        receipt=receipt,
        evaluation="<results>/runs/{run}/{stage}{compressed}/evaluation.json",
        data=audited_data,
        ngram=indexes("split", "full"),
        tasks=task_files,
    output:
        "<results>/runs/{run}/{stage}{compressed}/audit.json",
    log:
        "<logs>/audit/{run}/{stage}{compressed}.log",
    benchmark:
        "<benchmarks>/audit/runs/{run}/{stage}{compressed}/audit.tsv"
    threads: lookup(dpath="{run}/threads", within=RESOURCES)
    resources:
        gpu=one_gpu,
        mem_mb=lookup(dpath="{run}/mem_mb", within=RESOURCES),
        # A whole audit scores the text again and trains a stretch of the stage.
        runtime=growing(lookup(dpath="{run}/runtime", within=RESOURCES)),
    params:
        spider=command,
        options=audit_options,
    shell:
        "{params.spider} --log {log:q} audit {wildcards.run}/{wildcards.stage} {params.options} --warn "
        "--threads {threads} --output {output:q}"
