"""Text to shards: one download and one encode job a part, one index a dataset."""


rule download:
    input:
        local_file,
    output:
        "<results>/raw/{dataset}/{part}.parquet",
    params:
        identity=raw_identity,
    log:
        "<logs>/download/{dataset}/{part}.log",
    benchmark:
        "<benchmarks>/download/{dataset}-{part}.tsv"
    resources:
        mem_mb=2000,
        runtime=240,
    shell:
        f"{SPIDER} download {{wildcards.dataset}} {{wildcards.part}} --output {{output:q}}"


rule encode:
    input:
        "<results>/raw/{dataset}/{part}.parquet",
    output:
        multiext("<results>/shards/{dataset}/train/{part}", ".bin", ".idx", ".json"),
        multiext("<results>/shards/{dataset}/validation/{part}", ".bin", ".idx", ".json"),
    params:
        identity=encoding_identity,
    log:
        "<logs>/encode/{dataset}/{part}.log",
    benchmark:
        "<benchmarks>/encode/{dataset}-{part}.tsv"
    resources:
        mem_mb=2000,
        runtime=120,
    shell:
        f"{SPIDER} encode {{wildcards.dataset}} {{wildcards.part}} {{input:q}}"


rule index:
    input:
        shard_records,
    output:
        "<results>/shards/{dataset}/metadata.json",
    params:
        identity=lambda wildcards: CONFIG.datasets[wildcards.dataset].model_dump(),
    log:
        "<logs>/index/{dataset}.log",
    benchmark:
        "<benchmarks>/index/{dataset}.tsv"
    resources:
        mem_mb=1000,
        runtime=10,
    shell:
        f"{SPIDER} index {{wildcards.dataset}} --output {{output:q}}"
