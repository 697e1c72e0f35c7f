"""Finished runs of a ladder to a forecast, which larger runs need before they start, and a page for all ladders."""

from spider_lab.ladders import budgets_of, ladders_of, rungs_of, waiting_of

#: The ladder of each run that waits for a forecast.
WAITING = {run: name for name in ladders_of(CONFIG) for run in waiting_of(CONFIG, name)}


# A run that waits begins with its copy of a forecast. A later one never trains it again.
rules.train.rule.set_input(
    lambda wildcards: (
        ancient(f"<results>/runs/{wildcards.run}/forecast.json") if wildcards.run in WAITING else []
    )
)

if ladders_of(CONFIG):
    plan.wanted.append("<results>/report/ladders.html")

for ladder in ladders_of(CONFIG):

    rule:
        name:
            f"ladders/{ladder}"
        input:
            lambda wildcards, ladder=ladder: plan.measured(*waiting_of(CONFIG, ladder)),
            f"<results>/ladders/{ladder}/forecast.json",


rule forecast:
    input:
        lambda wildcards: expand(
            "{folder}/evaluation.json", folder=plan.stage_folders(*rungs_of(CONFIG, wildcards.ladder))
        ),
    output:
        "<results>/ladders/{ladder}/forecast.json",
    log:
        "<logs>/forecast/{ladder}.log",
    benchmark:
        "<benchmarks>/forecast/ladders/{ladder}/forecast.tsv"
    localrule: True
    params:
        spider=command,
        at=lambda wildcards: budgets_of(CONFIG, wildcards.ladder),
    shell:
        "{params.spider} --log {log:q} forecast {wildcards.ladder}"


rule claim_forecast:
    input:
        lambda wildcards: ancient(f"<results>/ladders/{WAITING[wildcards.run]}/forecast.json"),
    output:
        "<results>/runs/{run}/forecast.json",
    log:
        "<logs>/claim_forecast/{run}.log",
    benchmark:
        "<benchmarks>/claim_forecast/runs/{run}/forecast.tsv"
    localrule: True
    params:
        spider=command,
        ladder=lambda wildcards: WAITING[wildcards.run],
    shell:
        "{params.spider} --log {log:q} forecast {params.ladder} --run {wildcards.run}"


rule ladders:
    input:
        expand("<results>/ladders/{ladder}/forecast.json", ladder=ladders_of(CONFIG)),
        expand("{folder}/evaluation.json", folder=[plan.stage_folders(run)[-1] for run in WAITING]),
    output:
        "<results>/report/ladders.html",
        "<results>/report/ladders.json",
        "<results>/report/ladders.svg",
    log:
        "<logs>/ladders.log",
    benchmark:
        "<benchmarks>/ladders/report/ladders.tsv"
    localrule: True
    params:
        spider=command,
    shell:
        "{params.spider} --log {log:q} ladders"
