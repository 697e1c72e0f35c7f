"""Shards to memories: count each part, then merge the counts of all.

A memory is known by its dataset and the digest of what it was counted with, so runs share it. Training reads
the one of the memory split alone; whatever reads the model afterwards, that with the training text folded in.
"""


rule count:
    input:
        lambda wildcards: metadata(wildcards.dataset),
    output:
        temp(directory("<results>/memory/{dataset}/{counted}/counts/{part}")),
    log:
        "<logs>/count/{dataset}/{counted}-{part}.log",
    benchmark:
        "<benchmarks>/count/{dataset}/{counted}-{part}.tsv"
    resources:
        mem_mb=from_size(counting_of, "mem_mb"),
        runtime=from_size(counting_of, "minutes"),
    params:
        spider=command,
        run=counted_for,
    shell:
        "{params.spider} --log {log:q} count {params.run} {wildcards.part} --output {output:q}"


rule memory:
    input:
        counts=part_files("memory/{dataset}/{counted}/counts/{part}"),
    output:
        "<results>/memory/{dataset}/{counted}/{text}/memory.json",
    log:
        "<logs>/memory/{dataset}/{counted}-{text}.log",
    benchmark:
        "<benchmarks>/memory/{dataset}/{counted}-{text}.tsv"
    threads: 2
    resources:
        mem_mb=from_size(merging_of, "mem_mb"),
        runtime=from_size(merging_of, "minutes"),
    params:
        spider=command,
        run=counted_for,
        folded=lambda wildcards: "--folded" if wildcards.text == "folded" else "",
    shell:
        "{params.spider} --log {log:q} memory {params.run} {input.counts:q} --output {output:q} "
        "{params.folded} --threads {threads}"
