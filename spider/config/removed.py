"""Keys of earlier versions, and what to do instead."""

from __future__ import annotations

from fnmatch import fnmatch

_ALWAYS = "leave it out; this part is always on"
_ONE = "leave it out; it is {} now"

#: The remedy for each removed key, by the end of its path, in which * stands for any name.
REMOVED = {
    "links": "write the values out in `grid:`, or make it a ladder (extras/lab), whose links are formulas",
    "forecast": "leave it out, and name the run in `waiting:` of the ladder",
    "audit": "name the run in the block `audit` instead: `audit: {RUN: quick}`",
    "index_text": "name the dataset in the block `trace` instead: `trace: [DATASET]`",
    "evaluation.mixer": "write it as measurements: {spider_lab.mixer: {...}}, of the extra lab",
    "store": "link `raw` of the one results folder into the other",
    "fp8_recipe": "leave it out; values of a tensor share a scale (tensorwise)",
    "decontaminate.words": _ONE.format("13"),
    "decontaminate.shortest": _ONE.format("8"),
    "decontaminate.common": _ONE.format("10"),
    "harness.online": "run `spider harness RUN/STAGE --online` once, which keeps the data on this machine",
    "foreign.*.allow_lossy": "leave it out; choose a model whose tokenizer keeps the text",
    "foreign.*.window": "leave it out; it is the model's own context, at most 2,048 tokens",
    "groups.*.eps": "set optimizer.eps, for all groups",
    "rollouts.pattern": "leave it out, and set reward: last_number or exact",
    "answer_bytes": _ONE.format("1,000"),
    "ngram.carry_share": _ONE.format("a quarter"),
    "recurrence.injection": _ALWAYS,
    "recurrence.loop_embedding": _ALWAYS,
    "recurrence.halting": _ALWAYS,
    "recurrence.ponder_weight": _ONE.format("0.001"),
    "boundary.stride": "leave it out; patches are learned, or close at white space",
    "moe.implementation": "leave it out; experts are one product wherever their widths allow it",
    "moe.aux_weight": _ONE.format("0.01"),
    "engram.orders": _ONE.format("[3, 4, 5, 6]"),
    "engram.heads": _ONE.format("4"),
    "attention.rope_base": _ONE.format("10,000"),
}


def remedy_for(path: str) -> str | None:
    """Return what to do about a key that earlier versions had, or None."""
    return next((REMOVED[end] for end in REMOVED if fnmatch(f".{path}", f"*.{end}")), None)
