"""Keys of earlier versions, and what to do instead."""

from __future__ import annotations

from fnmatch import fnmatch

_ALWAYS = "leave it out; this part is always on"
_ONE = "leave it out; it is {} now"

_LAST_NUMBER = "leave it out; the last numbers of answer and reference are compared"
_REMOVE = "leave it out; such documents are removed, and `spider data removed` shows them"
_REINFORCED = (
    "leave it out; a stage with `rollouts: {}` learns by reinforcement, any other to predict the text"
)
_KEPT = "leave it out; evaluation.checkpoints are kept at equal shares of a stage, besides the two newest"
_LOOPED = "write both as `layers: [FIRST, LAST]`"

#: The remedy for each removed key, by the end of its path, in which * stands for any name.
REMOVED = {
    "links": "write the values out in `grid:`, or make it a ladder (extras/lab), whose links are formulas",
    "forecast": "leave it out, and name the run in `waiting:` of the ladder",
    "audit": "name the run in the block `audit` instead: `audit: {RUN: quick}`",
    "index_text": "name the dataset in the block `trace` instead: `trace: [DATASET]`",
    "evaluation.mixer": "write it as measurements: {spider_lab.mixer: {...}}, of the extra lab",
    "store": "link `raw` of the one results folder into the other",
    "fp8_recipe": "leave it out; values of a tensor share a scale (tensorwise)",
    "source.questions": "leave it out; there are all 8,100 sums of two numbers of two digits",
    "source.lock": "leave it out, and name the files in `files:`; `spider data files REPO GLOB` prints them",
    "source.digits": _ONE.format("2"),
    "source.operations": _ONE.format("+"),
    "source.documents": _ONE.format("2,000"),
    "near.containment": "write the share itself, `near: 0.8`",
    "near.action": _REMOVE,
    "decontaminate.held_out": "write `decontaminate: true`, which compares with held-out text and tasks",
    "decontaminate.tasks": "write `decontaminate: true`, which compares with held-out text and tasks",
    "decontaminate.folders": "write the list itself, `decontaminate: [FOLDER]`",
    "decontaminate.action": _REMOVE,
    "groups.*.eps": "set optimizer.eps, for all groups",
    "rollouts.pattern": _LAST_NUMBER,
    "objective": _REINFORCED,
    "rollouts.reward": _LAST_NUMBER,
    "answer_bytes": _ONE.format("1,000"),
    "ngram.carry_share": _ONE.format("a quarter"),
    "recurrence.injection": _ALWAYS,
    "recurrence.loop_embedding": _ALWAYS,
    "recurrence.halting": _ALWAYS,
    "recurrence.ponder_weight": _ONE.format("0.001"),
    "boundary.stride": "leave it out; patches are learned, or close at white space",
    "moe.implementation": "leave it out; experts are one product wherever their widths allow it",
    "moe.aux_weight": _ONE.format("0.01"),
    "foreign.*.model": "write the folder itself, `foreign: {NAME: FOLDER}`",
    "foreign.*.like": "leave it out; the text and the tasks are those of the first run",
    "compress.embedding_bits": _ONE.format("8"),
    "tracking.registry": "leave it out; each run is registered as a model",
    "tracking.copy_weights": "export the stage for people without access to the results folder",
    "ngram.candidates": _ONE.format("16"),
    "branch_scales": "leave it out; `residual_mix: vector` has these scales",
    "recurrence.first": _LOOPED,
    "recurrence.last": _LOOPED,
    "mix_start": "leave it out; it follows from residual_mix",
    "decay_embeddings": "set weight_decay of the group, `groups: {embedding: {weight_decay: 0.1}}`",
    "master_weights": "set weights of the group, `groups: {matrices: {weights: bf16}}`",
    "warmup_share": "write the share as warmup_steps, a number below 1",
    "tasks_items": _ONE.format("500"),
    "keep_last": _KEPT,
    "keep_every": _KEPT,
    "max_epochs": "leave it out, and end the dataset by `switches:`",
    "switches.sample": "write the sample as the key, `switches: {SAMPLE: {NAME: WEIGHT}}`",
    "evaluation.tasks.*.kind": "leave it out; `file` or `folder` says it",
    "evaluation.tasks.*.items": "shorten the file; only a bundle has `items`",
    "harness": "export a stage, and run `lm_eval --model hf` on the export (docs/evaluation.md)",
    "ttt.parameters": "set `layers: all` in place of `parameters: ffn_down`, else leave it out",
    "evaluation.prompt": "write it as the first of `prompts:`",
    "engram.orders": _ONE.format("[3, 4, 5, 6]"),
    "engram.heads": _ONE.format("4"),
    "attention.rope_base": _ONE.format("10,000"),
}


def remedy_for(path: str) -> str | None:
    """Return what to do about a key that earlier versions had, or None."""
    return next((REMOVED[end] for end in REMOVED if fnmatch(f".{path}", f"*.{end}")), None)
