"""Text to shards: one download and one encode job a part, one index a dataset, its tokenizer, its packed rows."""


rule download:
    input:
        own_files,
    output:
        parquet="<results>/raw/{dataset}/{part}.parquet",
        record="<results>/raw/{dataset}/{part}.json",
    log:
        "<logs>/download/{dataset}/{part}.log",
    benchmark:
        "<benchmarks>/download/{dataset}/{part}.tsv"
    resources:
        mem_mb=2000,
        runtime=longer(240),
    params:
        spider=command,
        identity=raw_identity,
    shell:
        "{params.spider} --log {log:q} data download {wildcards.dataset} {wildcards.part} --output {output.parquet:q}"


rule tokenizer:
    input:
        learned_from,
    output:
        "<results>/tokenizers/{tokenizer}/tokenizer.json",
    log:
        "<logs>/tokenizer/{tokenizer}.log",
    benchmark:
        "<benchmarks>/tokenizer/{tokenizer}.tsv"
    threads: 2
    resources:
        mem_mb=4000,
        runtime=longer(60),
    params:
        spider=command,
        identity=tokenizer_identity,
    shell:
        "{params.spider} --log {log:q} data tokenizer {wildcards.tokenizer} {input:q} --output {output:q} "
        "--threads {threads}"


rule encode:
    input:
        parquet=raw_part,
        tokenizer=tokenizer_file,
    output:
        multiext("<results>/shards/{dataset}/train/{part}", ".bin", ".idx", ".json"),
        multiext("<results>/shards/{dataset}/validation/{part}", ".bin", ".idx", ".json"),
    log:
        "<logs>/encode/{dataset}/{part}.log",
    benchmark:
        "<benchmarks>/encode/{dataset}/{part}.tsv"
    resources:
        mem_mb=2000,
        runtime=longer(120),
    params:
        spider=command,
        identity=encoding_identity,
    shell:
        "{params.spider} --log {log:q} data encode {wildcards.dataset} {wildcards.part} {input.parquet:q}"


# A rule's outputs are the same for all its jobs, so datasets with an n-gram index have one of their own.
if WITH_NGRAMS:

    use rule encode as encode_with_ngrams with:
        output:
            multiext("<results>/shards/{dataset}/train/{part}", ".bin", ".idx", ".json"),
            multiext("<results>/shards/{dataset}/validation/{part}", ".bin", ".idx", ".json"),
            multiext("<results>/shards/{dataset}/ngram/{part}", ".bin", ".idx", ".json"),
        wildcard_constraints:
            dataset="|".join(WITH_NGRAMS),

    ruleorder: encode_with_ngrams > encode


rule index:
    input:
        part_files("shards/{dataset}/train/{part}.json"),
        ngram_records,
        raw_records,
        tokenizer_file,
    output:
        "<results>/shards/{dataset}/metadata.json",
    log:
        "<logs>/index/{dataset}.log",
    benchmark:
        "<benchmarks>/index/{dataset}.tsv"
    threads: 2
    resources:
        mem_mb=1000,
        runtime=longer(10),
    params:
        spider=command,
        identity=lambda wildcards: CONFIG.datasets[wildcards.dataset].changed(),
    shell:
        "{params.spider} --log {log:q} data index {wildcards.dataset} --threads {threads} --output {output:q}"


rule pack:
    input:
        lambda wildcards: metadata(wildcards.dataset),
    output:
        multiext("<results>/shards/{dataset}/packed-{seq_len}", ".json", ".pieces", ".rows"),
    log:
        "<logs>/pack/{dataset}-{seq_len}.log",
    benchmark:
        "<benchmarks>/pack/{dataset}-{seq_len}.tsv"
    resources:
        mem_mb=from_size(packing_of, "mem_mb"),
        runtime=from_size(packing_of, "minutes"),
    params:
        spider=command,
    shell:
        "{params.spider} --log {log:q} data pack {wildcards.dataset} {wildcards.seq_len}"
