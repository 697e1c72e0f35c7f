"""Find held-out text in what a model has learned from.

*The rule of the split* (`spider.verify.splits`): each document has to be in the split that the rule gives.

*Copies.* The scored documents are searched for in all text that the model learned from, with the n-gram
split. They are found with the same text, with the same words, as near copies, and in pieces
(`spider_trust.copies`). Training documents have such copies of each other as well: licences, pages of a
template. So the scored documents are compared with a sample of training documents of the same dataset. The
check fails if they have more copies, and chance gives such a difference once in 10,000 times at most.

*Stretches of 50 bytes.* Their share of the scored bytes is reported. Licences and inherited docstrings are
normal, so the check fails only if the evaluation recorded another share.

*The n-gram index* has to be counted from its splits alone.

*Questions* of the tasks' files must not hold the text of their own right answer. They must not stand in the
training text with their answers. A question of 8 words or more does if a document has 80% of its 5-grams. One
question in twenty may.

A quick check reads the first rows of some raw files, and a sample of the training text.
"""

from __future__ import annotations

import random
from functools import partial

import numpy as np

from spider.config.tasks import JsonlTask
from spider.data.ngram.layout import symbols_of
from spider.data.ngram.store import open_index
from spider.data.shards import Shards, load_metadata
from spider.evaluation.overlap import MATCH_BYTES
from spider.evaluation.questions import Question, tasks, texts
from spider.evaluation.text import Text, validation_stream
from spider.tokens import BYTES
from spider.verify.claim import Claim, Finding
from spider.verify.splits import SHOWN, Step, joined, obstacle, rule
from spider_trust.copies import KINDS, LENGTH, Found, Piece, by_chance, drawn, pieces_of, search

#: Tokens of training text that a quick check reads.
QUICK_TEXT = 4 << 20
#: Training documents that the scored ones are compared with, and in a quick check.
SAMPLE = (4096, 512)
#: What copies of held-out documents look like, by their kind (`spider_trust.copies`).
LOOKS_LIKE = {
    "same": "are in the training text",
    "words": "are in the training text, in another normalization of the text",
    "near": "have near copies in the training text, with about {edited:.0%} of their words edited",
    "pieces": "stand in pieces in the training text",
}
#: A question of so many words counts as learned if a training document has this share of its 5-grams.
#: The last number is the share of such questions that is normal.
ASKED, ASKED_WORDS, ASKED_OFTEN = 0.8, 8, 0.05
#: Share of questions with their right answer and no other choice in them that is a fault, and their fewest.
TOLD, TOLD_LEAST = 0.8, 5
#: Share of the training text that counts as all of it, and by how much two shares of overlap may differ.
ALL, ROUNDING = 0.995, 1e-3

#: Splits that the n-gram indexes of a run count, by the name of the index.
INDEXES = {"split": ["ngram"], "full": ["ngram", "train"]}


def check(claim: Claim, quick: bool) -> Finding:
    """Return whether held-out text was found in what the model of a claim has learned from."""
    if reason := obstacle(claim):
        return reason
    settings, shards = claim.spec.evaluation, claim.results.shards(claim.held_out)
    text = Text.of(validation_stream(shards, settings.max_bytes, BYTES, settings.largest_group)[0], BYTES)
    steps: list[Step] = []
    for step in (partial(rule, claim, quick), *(partial(one, claim, quick, text) for one in _STEPS)):
        try:
            steps.append(step())
        except ValueError as error:
            steps.append(({str(error).splitlines()[0]: []}, ""))
    return joined(steps)


# ------------------------------------------------------------------------------------------------- copies


def _copies(claim: Claim, quick: bool, text: Text) -> Step:
    """Return the copies of scored documents and of questions in the training text."""
    pieces = list(pieces_of(claim.datasets))
    searched = _some(pieces) if quick else pieces
    raw = claim.config.raw(claim.held_out)
    alike = [piece for piece in searched if claim.config.raw(piece.dataset) == raw]
    sample = drawn(alike or searched, SAMPLE[quick])
    asked = [one for task in claim.spec.evaluation.tasks.values() for one in texts(task)]
    groups = text.documents(), [*sample.values()], [answered.encode() for _, (_, answered) in asked]
    own_D = np.concatenate([np.full(len(groups[0]), -1), [*sample], np.full(len(asked), -1)]).astype(np.int64)
    found = search([one for group in groups for one in group], own_D, text, searched)
    problems, phrase = _copied(found, len(groups[0]), len(sample))
    problems |= _asked(found, [where for where, _ in asked])
    share = float(found.covered_N.mean())
    problems |= _overlap(claim, share) if len(searched) == len(pieces) else {}
    stretches = f"{share:.1%} of their bytes are in stretches of {MATCH_BYTES} bytes that it has as well"
    return problems, f"{phrase}; {stretches}"


def _some(pieces: list[Piece]) -> list[Piece]:
    """Return a random sample of about `QUICK_TEXT` tokens, in its order."""
    order = random.Random(0).sample(range(len(pieces)), len(pieces))
    before = np.cumsum([0, *(int(np.ptp(pieces[number].bounds_T)) for number in order)])
    chosen = {number for number, size in zip(order, before, strict=False) if size < QUICK_TEXT}
    return [piece for number, piece in enumerate(pieces) if number in chosen]


def _copied(found: Found, held_out: int, training: int) -> Step:
    """Return whether the first documents have more copies than the next, which are of the training text."""
    kinds = {
        kind: np.split(copied_D, [held_out, held_out + training]) for kind, copied_D in found.kinds.items()
    }
    counts = [(int(mine_D.sum()), int(theirs_D.sum())) for mine_D, theirs_D, _ in kinds.values()]
    if all(by_chance(mine, held_out, theirs, training) for mine, theirs in counts):
        phrase = f"of {held_out} held-out documents {counts[-1][0]} have a copy in the training text"
        return {}, f"{phrase}, no more than training documents have"
    # The kind of most copies gives the name. It includes the kinds before it.
    at = int(np.diff([mine for mine, _ in counts], prepend=0).argmax())
    copied_D = np.flatnonzero(kinds[KINDS[at]][0])
    edited = 1 - float(np.median(found.share_D[copied_D])) ** (1 / LENGTH)
    reason = f"{len(copied_D) / held_out:.0%} of the {held_out} held-out documents "
    reason += LOOKS_LIKE[KINDS[at]].format(edited=edited)
    reason += f" ({len(copied_D)}; of the training documents {counts[at][1] / max(1, training):.1%} do)"
    return {reason: [f"held-out document {d}: {found.place(d)}" for d in copied_D[:SHOWN].tolist()]}, ""


def _asked(found: Found, places: list[str]) -> dict[str, list[str]]:
    """Return whether the last documents, which are questions from these places, are in the training text."""
    first = len(found.share_D) - len(places)
    known = (found.share_D >= ASKED) & (found.length_D >= ASKED_WORDS)
    asked = [f"{places[d - first]}: {found.place(d)}" for d in np.flatnonzero(known).tolist() if d >= first]
    if len(asked) <= max(2, ASKED_OFTEN * len(places)):
        return {}
    reason = f"{len(asked)} of {len(places)} questions stand with their answers in the training text"
    return {reason: asked[:SHOWN]}


def _overlap(claim: Claim, share: float) -> dict[str, list[str]]:
    """Return whether the evaluation records another overlap, which may be of a part of the training text."""
    recorded = claim.evaluation.results.get("overlap")
    was = recorded.metrics.get("overlap/share") if recorded else None
    if recorded is None or was is None:
        return {}
    whole = recorded.metrics.get("overlap/searched", 0) > ALL
    if was <= share + ROUNDING and not (whole and was < share - ROUNDING):
        return {}
    reason = f"the evaluation records an overlap of {was:.1%} with the training text, but it is {share:.1%}"
    return {reason: []}


# ------------------------------------------------------------------------------------- index and questions


def _index(claim: Claim, quick: bool, text: Text) -> Step:
    """Return what the n-gram indexes of a run count beside the text that they may count."""
    run, problems = claim.config.run(claim.run), {}
    if run.model.ngram is None:
        return {}, ""
    shards = claim.results.shards(run.dataset)
    symbols = symbols_of(load_metadata(shards).vocabulary)
    for name, splits in INDEXES.items():
        index = open_index(claim.results.ngram(run.dataset, run.model.ngram.counted, name))
        counted = index.tables.text
        files = [one for split in splits for one in Shards(shards, split).maps]
        pieces = np.split(counted, np.cumsum([len(tokens_N) for tokens_N in files]))
        same = all(np.array_equal(piece, symbols[one]) for piece, one in zip(pieces, files, strict=False))
        if not same or len(pieces[-1]) or index.description.splits != splits:
            raw, documents = counted.tobytes(), text.documents()
            share = sum(one in raw for one in documents) / len(documents)
            reason = f"the n-gram index counts another text than the splits {' and '.join(splits)}"
            reason += f", with {share:.0%} of the {len(documents)} held-out documents"
            problems[reason] = [str(index.folder)]
    return problems, ""


def _told(claim: Claim, quick: bool, text: Text) -> Step:
    """Return the tasks whose questions hold the text of their right answer."""
    problems = {}
    for name, config in claim.spec.evaluation.tasks.items():
        if not isinstance(config, JsonlTask):
            continue
        (task,) = tasks(name, config.model_copy(update={"shots": 0, "chat": False}))
        asked = [one for one in task.questions if len(one.choices) > 1 or _words(one) >= ASKED_WORDS]
        told = sum(map(_is_told, asked))
        if told >= TOLD * len(asked) and len(asked) >= TOLD_LEAST:
            reason = f"{told} of {len(asked)} questions of the task {name} hold the text of the right answer"
            problems[reason] = [config.file]
    return problems, ""


def _words(question: Question) -> int:
    return len(question.choices[question.gold].split())


def _is_told(question: Question) -> bool:
    """Return whether the right answer stands in the question, and no other choice does."""
    pairs = zip(question.choices, question.contexts, strict=True)
    stands = [choice.strip() in context for choice, context in pairs]
    return stands[question.gold] and sum(stands) == 1


_STEPS = (_copies, _index, _told)
