"""Text to shards: download and encode each part, then index the dataset. A dataset may also have packed rows."""


rule download:
    input:
        plan.own_files,
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
        **plan.of_part("download"),
    params:
        spider=command,
        identity=plan.raw_identity,
    shell:
        "{params.spider} --log {log:q} data download {wildcards.dataset} {wildcards.part} --output {output.parquet:q}"


# All jobs of a rule have the same outputs, so datasets whose raw text is deleted have a rule of their own.
TEMPORARY = [name for name, dataset in CONFIG.datasets.items() if dataset.temp]
if TEMPORARY:

    use rule download as download_temp with:
        output:
            parquet=temp("<results>/raw/{dataset}/{part}.parquet"),
            record="<results>/raw/{dataset}/{part}.json",
        wildcard_constraints:
            dataset="|".join(TEMPORARY),

    ruleorder: download_temp > download


# Files that others publish, each at the place where the configuration names it.
if CONFIG.downloads:

    rule fetch:
        output:
            record="<results>/downloads/{file}.json",
            # A file that is there is compared with its hash, and stays.
            file=update(local("{file}")),
        log:
            "<logs>/fetch/{file}.log",
        benchmark:
            "<benchmarks>/fetch/{file}.tsv"
        wildcard_constraints:
            file=plan.downloaded(),
        priority: 1
        resources:
            runtime=growing(240),
        params:
            spider=command,
            identity=lambda wildcards: CONFIG.download(wildcards.file),
        shell:
            "{params.spider} --log {log:q} data fetch {output.file:q}"


rule tokenizer:
    input:
        parquets=plan.learned_from,
        removed=plan.not_learned_from,
    output:
        "<results>/tokenizers/{tokenizer}/tokenizer.json",
    log:
        "<logs>/tokenizer/{tokenizer}.log",
    benchmark:
        "<benchmarks>/tokenizer/tokenizers/{tokenizer}/tokenizer.tsv"
    priority: 1
    resources:
        **requested(lambda wildcards: plan.requests.learning(wildcards.tokenizer)),
    params:
        spider=command,
        identity=plan.tokenizer_identity,
    shell:
        "{params.spider} --log {log:q} data tokenizer {wildcards.tokenizer} {input.parquets:q} --output {output:q} "
        "--threads {threads}"


rule encode:
    input:
        parquet=plan.raw_part,
        removed=plan.removed_part,
        tokenizer=plan.tokenizer_file,
    output:
        multiext("<results>/shards/{dataset}/train/{part}", ".bin", ".idx", ".json"),
        multiext("<results>/shards/{dataset}/validation/{part}", ".bin", ".idx", ".json"),
    log:
        "<logs>/encode/{dataset}/{part}.log",
    benchmark:
        "<benchmarks>/encode/shards/{dataset}/train/{part}.tsv"
    priority: 1
    resources:
        **plan.of_part("encode"),
    params:
        spider=command,
        identity=plan.encoding_identity,
        file=lambda wildcards, input: real(input.parquet),
    shell:
        "{params.spider} --log {log:q} data encode {wildcards.dataset} {wildcards.part} {params.file:q}"


# For the same reason, datasets with an n-gram split have a rule of their own.
WITH_NGRAMS = [name for name, dataset in CONFIG.datasets.items() if dataset.ngram]
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
        plan.part_files("shards/{dataset}/train/{part}.json"),
        # Snakemake compares no params of a job whose output no other job reads. So an index reads these records,
        # or a changed share of documents for the n-gram index would leave finished parts as they are.
        branch(
            lambda wildcards: plan.dataset(wildcards).ngram,
            then=plan.part_files("shards/{dataset}/ngram/{part}.json"),
        ),
        plan.raw_records,
        plan.tokenizer_file,
    output:
        "<results>/shards/{dataset}/metadata.json",
    log:
        "<logs>/index/{dataset}.log",
    benchmark:
        "<benchmarks>/index/shards/{dataset}/metadata.tsv"
    priority: 1
    threads: lambda wildcards: plan.requests.index(wildcards.dataset)[0]
    resources:
        runtime=growing(lambda wildcards: plan.requests.index(wildcards.dataset)[1]),
    params:
        spider=command,
        identity=lambda wildcards: plan.dataset(wildcards).changed(),
    shell:
        "{params.spider} --log {log:q} data index {wildcards.dataset} --threads {threads} --output {output:q}"


rule pack:
    input:
        plan.shards,
    output:
        multiext("<results>/shards/{dataset}/packed-{seq_len}", ".json", ".pieces", ".rows"),
    log:
        "<logs>/pack/{dataset}-{seq_len}.log",
    benchmark:
        "<benchmarks>/pack/shards/{dataset}/packed-{seq_len}.tsv"
    priority: 1
    resources:
        **requested(lambda wildcards: plan.requests.packing(wildcards.dataset, int(wildcards.seq_len))),
    params:
        spider=command,
    shell:
        "{params.spider} --log {log:q} data pack {wildcards.dataset} {wildcards.seq_len}"
