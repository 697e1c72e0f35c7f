"""Raw text to evidence: hash each document of a part, pair it with earlier ones, and decide what is removed.

A part depends on the parts before it and on the datasets in `against`, so new parts at the end run nothing again. Only
datasets whose documents are compared have these jobs (`cleaning:` with `exact` and others).
"""


rule signatures:
    input:
        plan.raw_part,
    output:
        "<results>/cleaning/{dataset}/signatures/{part}.parquet",
    log:
        "<logs>/signatures/{dataset}/{part}.log",
    benchmark:
        "<benchmarks>/signatures/cleaning/{dataset}/signatures/{part}.tsv"
    priority: 1
    params:
        spider=command,
        identity=plan.signatures_identity,
    shell:
        "{params.spider} --log {log:q} data signatures {wildcards.dataset} {wildcards.part}"


rule candidates:
    input:
        "<results>/cleaning/{dataset}/signatures/{part}.parquet",
        lambda wildcards: plan.earlier("signatures", wildcards),
    output:
        "<results>/cleaning/{dataset}/candidates/{part}.parquet",
    log:
        "<logs>/candidates/{dataset}/{part}.log",
    benchmark:
        "<benchmarks>/candidates/cleaning/{dataset}/candidates/{part}.tsv"
    priority: 1
    params:
        spider=command,
        identity=plan.candidates_identity,
    shell:
        "{params.spider} --log {log:q} data candidates {wildcards.dataset} {wildcards.part}"


# Only datasets whose near duplicates are found have this job.
rule verify_pairs:
    input:
        "<results>/cleaning/{dataset}/candidates/{part}.parquet",
        "<results>/cleaning/{dataset}/signatures/{part}.parquet",
        plan.raw_part,
        lambda wildcards: plan.earlier("signatures", wildcards),
        lambda wildcards: plan.earlier("raw", wildcards),
    output:
        "<results>/cleaning/{dataset}/verified/{part}.parquet",
    log:
        "<logs>/verify_pairs/{dataset}/{part}.log",
    benchmark:
        "<benchmarks>/verify_pairs/cleaning/{dataset}/verified/{part}.tsv"
    priority: 1
    resources:
        mem_mb=growing(4000),
    params:
        spider=command,
        identity=plan.verified_identity,
    shell:
        "{params.spider} --log {log:q} data verify-pairs {wildcards.dataset} {wildcards.part}"


rule drop:
    input:
        plan.evidence,
        lambda wildcards: plan.earlier("removed", wildcards),
    output:
        multiext("<results>/cleaning/{dataset}/removed/{part}", ".parquet", ".json"),
    log:
        "<logs>/drop/{dataset}/{part}.log",
    benchmark:
        "<benchmarks>/drop/cleaning/{dataset}/removed/{part}.tsv"
    priority: 1
    params:
        spider=command,
    shell:
        "{params.spider} --log {log:q} data drop {wildcards.dataset} {wildcards.part}"


rule held_out:
    input:
        plan.raw_part,
    output:
        "<results>/cleaning/{dataset}/held_out/{part}.parquet",
    log:
        "<logs>/held_out/{dataset}/{part}.log",
    benchmark:
        "<benchmarks>/held_out/cleaning/{dataset}/held_out/{part}.tsv"
    priority: 1
    params:
        spider=command,
        identity=plan.split_identity,
    shell:
        "{params.spider} --log {log:q} data held-out {wildcards.dataset} {wildcards.part}"


rule protect:
    input:
        plan.protected_texts,
    output:
        "<results>/cleaning/{dataset}/protected.parquet",
    log:
        "<logs>/protect/{dataset}.log",
    benchmark:
        "<benchmarks>/protect/cleaning/{dataset}/protected.tsv"
    priority: 1
    params:
        spider=command,
        tasks=lambda wildcards: [name for name, _ in CONFIG.protected_tasks(wildcards.dataset)],
    shell:
        "{params.spider} --log {log:q} data protect {wildcards.dataset}"


rule contaminated:
    input:
        plan.raw_part,
        "<results>/cleaning/{dataset}/protected.parquet",
    output:
        "<results>/cleaning/{dataset}/contaminated/{part}.parquet",
    log:
        "<logs>/contaminated/{dataset}/{part}.log",
    benchmark:
        "<benchmarks>/contaminated/cleaning/{dataset}/contaminated/{part}.tsv"
    priority: 1
    resources:
        mem_mb=growing(3000),
    params:
        spider=command,
        identity=plan.split_identity,
    shell:
        "{params.spider} --log {log:q} data contaminated {wildcards.dataset} {wildcards.part}"
