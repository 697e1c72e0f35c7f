"""Shards to n-gram indexes: count each part, then merge the counts of all parts.

Runs share an index. Its path has the dataset and a digest of the settings that decide the counts. Training reads the
index of the n-gram split; everything after it reads the full one, which includes the training split.
"""


rule count_ngrams:
    input:
        plan.shards,
    output:
        temp(directory("<results>/ngram/{dataset}/{counted}/counts/{part}")),
    log:
        "<logs>/count_ngrams/{dataset}/{counted}-{part}.log",
    benchmark:
        "<benchmarks>/count_ngrams/ngram/{dataset}/{counted}/counts/{part}.tsv"
    priority: 1
    resources:
        **requested(lambda wildcards: plan.requests.counting(**wildcards)),
    params:
        spider=command,
        run=plan.ngram_reader,
    shell:
        "{params.spider} --log {log:q} data count-ngrams {params.run} {wildcards.part} --output {output:q}"


rule build_ngrams:
    input:
        counts=plan.part_files("ngram/{dataset}/{counted}/counts/{part}"),
    output:
        "<results>/ngram/{dataset}/{counted}/{text}/index.json",
    log:
        "<logs>/build_ngrams/{dataset}/{counted}-{text}.log",
    benchmark:
        "<benchmarks>/build_ngrams/ngram/{dataset}/{counted}/{text}/index.tsv"
    priority: 1
    resources:
        **requested(lambda wildcards: plan.requests.merging(**wildcards)),
    params:
        spider=command,
        run=plan.ngram_reader,
        full=branch(lambda wildcards: wildcards.text == "full", then="--full", otherwise=""),
    shell:
        "{params.spider} --log {log:q} data build-ngrams {params.run} {input.counts:q} --output {output:q} "
        "{params.full} --threads {threads}"
