"""Raw text to evidence: hash each document, pair it with earlier ones, and decide what is removed.

A few jobs find equal hashes in all parts, so no part waits for the part before it. What is removed of a part depends on
the parts before it and on the datasets in `against`, so new parts at the end encode none again. Only datasets whose
documents are compared have these jobs (`cleaning:` with `exact` and others).
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
    resources:
        **plan.of_part("signatures"),
    params:
        spider=command,
        identity=plan.signatures_identity,
    shell:
        "{params.spider} --log {log:q} data signatures {wildcards.dataset} {wildcards.part}"


rule buckets:
    input:
        plan.keys,
    output:
        temp(directory("<results>/cleaning/{dataset}/buckets/{last}-{bucket}")),
    log:
        "<logs>/buckets/{dataset}/{last}-{bucket}.log",
    benchmark:
        "<benchmarks>/buckets/cleaning/{dataset}/buckets/{last}-{bucket}.tsv"
    priority: 1
    resources:
        **requested(lambda wildcards: plan.requests.buckets(wildcards.dataset)),
    params:
        spider=command,
        first=plan.first_cleaned,
        jobs=lambda wildcards: CONFIG.buckets(wildcards.dataset),
    shell:
        "{params.spider} --log {log:q} data buckets {wildcards.dataset} {params.first} {wildcards.last} "
        "--share {wildcards.bucket} {params.jobs} --output {output:q}"


# Where near duplicates are found, their texts are compared, so the raw files are read again.
rule pairs:
    input:
        "<results>/cleaning/{dataset}/signatures/{part}.parquet",
        buckets=plan.buckets,
    output:
        "<results>/cleaning/{dataset}/pairs/{part}.parquet",
    log:
        "<logs>/pairs/{dataset}/{part}.log",
    benchmark:
        "<benchmarks>/pairs/cleaning/{dataset}/pairs/{part}.tsv"
    priority: 1
    resources:
        **plan.of_part("pairs"),
    params:
        spider=command,
        identity=plan.pairs_identity,
    shell:
        "{params.spider} --log {log:q} data pairs {wildcards.dataset} {wildcards.part} {input.buckets:q}"


# A document that was removed removes no other one, so one job decides for all parts, and another one for parts that the
# user adds when it is done.
CLEANED = [name for name in CONFIG.datasets if CONFIG.cleaning(name) and CONFIG.raw(name) == name]
for dataset, parts in ((name, parts) for name in CLEANED for parts in plan.cleaned(name)):

    rule:
        name:
            f"drop_{dataset}_{parts[-1]}"
        input:
            plan.evidence(dataset, parts),
        output:
            expand(f"<results>/cleaning/{dataset}/removed/{{part}}.parquet", part=parts),
        log:
            f"<logs>/drop/{dataset}/{parts[-1]}.log",
        benchmark:
            f"<benchmarks>/drop/cleaning/{dataset}/removed/{parts[-1]}.tsv"
        priority: 1
        resources:
            **requested(lambda wildcards, name=dataset: plan.requests.dropping(name)),
        params:
            spider=command,
            parts=f"{dataset} {parts[0]} {parts[-1]}",
        shell:
            "{params.spider} --log {log:q} data drop {params.parts}"


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
    resources:
        **plan.of_part("held_out"),
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
    resources:
        **requested(lambda wildcards: plan.requests.protecting(wildcards.dataset)),
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
        **plan.of_part("contaminated"),
    params:
        spider=command,
        identity=plan.split_identity,
    shell:
        "{params.spider} --log {log:q} data contaminated {wildcards.dataset} {wildcards.part}"
