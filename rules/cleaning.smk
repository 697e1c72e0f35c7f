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


# Where near duplicates are found, their texts are compared, so the raw files are read again.
rule pairs:
    input:
        "<results>/cleaning/{dataset}/signatures/{part}.parquet",
        lambda wildcards: plan.earlier("signatures", wildcards),
        plan.compared_texts,
    output:
        "<results>/cleaning/{dataset}/pairs/{part}.parquet",
    log:
        "<logs>/pairs/{dataset}/{part}.log",
    benchmark:
        "<benchmarks>/pairs/cleaning/{dataset}/pairs/{part}.tsv"
    priority: 1
    resources:
        mem_mb=growing(4000),
    params:
        spider=command,
        identity=plan.pairs_identity,
    shell:
        "{params.spider} --log {log:q} data pairs {wildcards.dataset} {wildcards.part}"


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
