"""Text to shards: download and encode each part, then index the dataset. A dataset may also have packed rows."""


rule download:
    input:
        own_files,
    output:
        parquet="<results>/raw/{dataset}/{part}.parquet",
        record="<results>/raw/{dataset}/{part}.json",
    log:
        "<logs>/download/{dataset}/{part}.log",
    benchmark:
        "<benchmarks>/download/raw/{dataset}/{part}.tsv"
    # What trainings wait for comes before evaluations, which fill the gaps.
    priority: 1
    resources:
        mem_mb=growing(2000),
        runtime=growing(240),
    params:
        spider=command,
        identity=raw_identity,
    shell:
        "{params.spider} --log {log:q} data download {wildcards.dataset} {wildcards.part} --output {output.parquet:q}"


# All jobs of a rule have the same outputs, so datasets whose raw text is deleted have a rule of their own.
if TEMPORARY:

    use rule download as download_temp with:
        output:
            parquet=temp("<results>/raw/{dataset}/{part}.parquet"),
            record="<results>/raw/{dataset}/{part}.json",
        wildcard_constraints:
            dataset="|".join(TEMPORARY),

    ruleorder: download_temp > download


rule tokenizer:
    input:
        parquets=learned_from,
        removed=not_learned_from,
    output:
        "<results>/tokenizers/{tokenizer}/tokenizer.json",
    log:
        "<logs>/tokenizer/{tokenizer}.log",
    benchmark:
        "<benchmarks>/tokenizer/tokenizers/{tokenizer}/tokenizer.tsv"
    priority: 1
    resources:
        mem_mb=growing(4000),
        runtime=growing(60),
    params:
        spider=command,
        identity=tokenizer_identity,
    shell:
        "{params.spider} --log {log:q} data tokenizer {wildcards.tokenizer} {input.parquets:q} --output {output:q} "
        "--threads {threads}"


rule encode:
    input:
        parquet=raw_part,
        removed=removed_part,
        tokenizer=tokenizer_file,
    output:
        multiext("<results>/shards/{dataset}/train/{part}", ".bin", ".idx", ".json"),
        multiext("<results>/shards/{dataset}/validation/{part}", ".bin", ".idx", ".json"),
    log:
        "<logs>/encode/{dataset}/{part}.log",
    benchmark:
        "<benchmarks>/encode/shards/{dataset}/train/{part}.tsv"
    priority: 1
    resources:
        mem_mb=growing(2000),
        runtime=growing(120),
    params:
        spider=command,
        identity=encoding_identity,
        file=lambda wildcards, input: real(input.parquet),
    shell:
        "{params.spider} --log {log:q} data encode {wildcards.dataset} {wildcards.part} {params.file:q}"


# For the same reason, datasets with an n-gram split have a rule of their own.
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
        # Snakemake compares no params of a job whose output no other job reads. So an index reads these records,
        # or a changed share of documents for the n-gram index would leave finished parts as they are.
        branch(
            lambda wildcards: dataset_of(wildcards).ngram,
            then=part_files("shards/{dataset}/ngram/{part}.json"),
        ),
        raw_records,
        tokenizer_file,
    output:
        "<results>/shards/{dataset}/metadata.json",
    log:
        "<logs>/index/{dataset}.log",
    benchmark:
        "<benchmarks>/index/shards/{dataset}/metadata.tsv"
    priority: 1
    resources:
        mem_mb=growing(1000),
        runtime=growing(10),
    params:
        spider=command,
        identity=lambda wildcards: dataset_of(wildcards).changed(),
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
        "<benchmarks>/pack/shards/{dataset}/packed-{seq_len}.tsv"
    priority: 1
    resources:
        mem_mb=growing(lambda w: REQUESTS.packing(w.dataset, int(w.seq_len)).mem_mb),
        runtime=growing(lambda w: REQUESTS.packing(w.dataset, int(w.seq_len)).minutes),
    params:
        spider=command,
    shell:
        "{params.spider} --log {log:q} data pack {wildcards.dataset} {wildcards.seq_len}"
