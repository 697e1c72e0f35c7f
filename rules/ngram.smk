"""Shards to indexes: count each part, then merge the counts of all.

An n-gram index is known by its dataset and the digest of what it was counted with, so runs share it. Training reads
the one of the n-gram index split alone; whatever reads the model afterwards, that with the training text merged in.
"""


rule count_ngrams:
    input:
        lambda wildcards: metadata(wildcards.dataset),
    output:
        temp(directory("<results>/ngram/{dataset}/{counted}/counts/{part}")),
    log:
        "<logs>/count_ngrams/{dataset}/{counted}-{part}.log",
    benchmark:
        "<benchmarks>/count_ngrams/{dataset}/{counted}-{part}.tsv"
    resources:
        mem_mb=from_size(counting_of, "mem_mb"),
        runtime=from_size(counting_of, "minutes"),
    params:
        spider=command,
        run=counted_for,
    shell:
        "{params.spider} --log {log:q} data count-ngrams {params.run} {wildcards.part} --output {output:q}"


rule build_ngrams:
    input:
        counts=part_files("ngram/{dataset}/{counted}/counts/{part}"),
    output:
        "<results>/ngram/{dataset}/{counted}/{text}/index.json",
    log:
        "<logs>/build_ngrams/{dataset}/{counted}-{text}.log",
    benchmark:
        "<benchmarks>/build_ngrams/{dataset}/{counted}-{text}.tsv"
    threads: 2
    resources:
        mem_mb=from_size(merging_of, "mem_mb"),
        runtime=from_size(merging_of, "minutes"),
    params:
        spider=command,
        run=counted_for,
        full=lambda wildcards: "--full" if wildcards.text == "full" else "",
    shell:
        "{params.spider} --log {log:q} data build-ngrams {params.run} {input.counts:q} --output {output:q} "
        "{params.full} --threads {threads}"
