"""Find held-out text in what a model has learned from.

*The rule of the split.* Each raw file is read and encoded again. Each document of the shards has to be one
of the raw file, in its tokens and in the split that the rule gives. Each document of the raw file has to be
there, except for those that cleaning removed (`spider.audit.rule`).

*Copies.* The scored documents are searched for in all text that the model learned from, the n-gram split
included: the same text, the same words, near copies, and pieces (`spider.audit.copies`). Training documents
have such copies of each other as well: licences, pages of a template. So copies are a fault only where the
scored documents have more of them than a sample of training documents of the same dataset has, and chance
gives such a difference once in 10,000 times at most.

*Stretches of 50 bytes.* Their share of the scored bytes is reported. It is no fault in itself, because
licences and inherited docstrings are normal. It is a fault if the evaluation recorded another share.

*The scored text* has to be the beginning of the validation split, as the settings give it. *The n-gram
index* has to be counted from its splits alone. *Questions* of the tasks' files must not stand in the
training text with their answers: 80% of the word 5-grams of a question of 8 words or more. Of common
questions, one in twenty may. Nor must they hold the text of their own right answer.

A quick check reads a sample of the parts and of the training text.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np

from spider.audit.claim import Claim
from spider.audit.copies import KINDS, Index, Piece, by_chance, pieces_of
from spider.audit.record import Finding
from spider.audit.rule import compare, faults
from spider.cleaning.minhash import LENGTH
from spider.config.tasks import JsonlTask
from spider.data.metadata import load_metadata
from spider.data.shards import Shards
from spider.evaluation.overlap import MATCH_BYTES
from spider.evaluation.questions import Question, tasks, texts
from spider.evaluation.text import Text, validation_stream
from spider.ngram.layout import symbols_of
from spider.ngram.store import open_index
from spider.tokens import BYTES

THREADS = 2
#: Bytes of raw files, and tokens of training text, that a quick check reads.
QUICK = 12 << 20
#: Training documents that the scored ones are compared with, and in a quick check.
SAMPLE, QUICK_SAMPLE = 4096, 512
#: Lines of details of a problem.
SHOWN = 10
#: What copies of held-out documents look like, by their kind.
LOOKS_LIKE = {
    "same": "are in the training text",
    "words": "are in the training text, in another normalization of the text",
    "near": "have near copies in the training text, with about {edited:.0%} of their words edited",
    "pieces": "stand in pieces in the training text",
}
#: Least share of a question's 5-grams in a training document, fewest words of it, and the share of such
#: questions that is normal.
ASKED, ASKED_WORDS, ASKED_OFTEN = 0.8, 8, 0.05
#: Least share of questions that hold their right answer and no other choice, and the fewest questions.
TOLD, TOLD_LEAST = 0.8, 5
#: Share of the training text that counts as all of it, and by how much two shares of overlap may differ.
ALL, ROUNDING = 0.995, 1e-3

T = TypeVar("T")


class Problem(NamedTuple):
    """What is wrong, as the part of a sentence, and where."""

    reason: str
    details: list[str]


def check(claim: Claim, quick: bool) -> Finding:
    """Return whether held-out text was found in what the model of a claim has learned from."""
    began = time.perf_counter()
    streams = [spec.data for spec in claim.specs if spec.stream]
    folders = {name: claim.results.shards(name) for name in [*claim.datasets, claim.held_out]}
    absent = [name for name, folder in folders.items() if not (folder / "metadata.json").exists()]
    if streams or absent:
        why = "is a stream, whose text is not stored" if streams else "has no shards here"
        return Finding(check="splits", status="skipped", reason=f"{(streams or absent)[0]} {why}.")
    problems: dict[str, list[str]] = {}
    said = []
    for step in (_rule, _scored, _copies, _index, _told):
        try:
            found, phrase = step(claim, quick)
        except ValueError as error:
            found, phrase = [Problem(str(error).splitlines()[0], [])], ""
        problems |= dict(found)
        said += [phrase] if phrase else []
    reason = "; ".join(problems or said)
    return Finding(
        check="splits",
        status="failed" if problems else "passed",
        reason=f"{reason[0].upper()}{reason[1:]}.",
        details=[line for lines in problems.values() for line in lines],
        seconds=time.perf_counter() - began,
    )


def _rule(claim: Claim, quick: bool) -> tuple[list[Problem], str]:
    """Return what differs from the rule of the split, and a phrase about the parts that were compared."""
    parts: list[tuple[str, str]] = []
    without, problems = 0, []
    for name in dict.fromkeys([*claim.datasets, claim.held_out]):
        known, raw = list(claim.config.parts(name)), claim.config.raw(name)
        described = load_metadata(claim.results.shards(name)).splits.values()
        if more := sorted({shard.part for split in described for shard in split.shards} - {*known}):
            reason = f"{name} has shards of parts that its source does not have: {', '.join(more)}"
            problems.append(Problem(reason, []))
        files = {part: claim.results.raw(raw, part) for part in known}
        sizes = {part: path.stat().st_size for part, path in files.items() if path.exists()}
        if claim.config.dataset(name).source.TOKENS:
            sizes = {}
        without += len(known) - len(sizes)
        parts += [(name, part) for part in _sample(sizes, QUICK if quick else None)]
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(lambda of: compare(claim, *of), parts))
    problems += [Problem(reason, places[:SHOWN]) for reason, places in faults(found)]
    ruled = f"each document of {len(parts)} parts is in the split that the rule gives"
    if without:
        ruled += (
            f"; for {without} parts the rule could not be computed again, because their raw text is not here"
        )
    return problems, ruled


def _sample(sizes: dict[T, int], most: int | None) -> list[T]:
    """Return a random sample of about ``most`` bytes or tokens; all without a limit."""
    names = random.Random(0).sample([*sizes], len(sizes))
    before = np.cumsum([0, *(sizes[name] for name in names)])
    return [name for name, so_far in zip(names, before, strict=False) if most is None or so_far < most]


def _text(claim: Claim) -> tuple[np.ndarray, Text, str]:
    """Return the held-out text that the settings give, in ids and as text, and the digest of its dataset."""
    settings, folder = claim.spec.evaluation, claim.results.shards(claim.held_out)
    tokens_N, digest = validation_stream(folder, settings.max_bytes, BYTES, settings.largest_group)
    return tokens_N, Text.of(tokens_N, BYTES), digest


def _scored(claim: Claim, quick: bool) -> tuple[list[Problem], str]:
    """Return how the scored text differs from the one that the settings give."""
    evaluation = claim.evaluation
    tokens_N, text, digest = _text(claim)
    begins, ends = (int(np.count_nonzero(tokens_N == one)) for one in (BYTES.bos, BYTES.eos))
    wanted = {"bytes": len(text), "documents": begins, "data_digest": digest}
    wanted["text_sha256"] = hashlib.sha256(text.bytes_N.tobytes()).hexdigest()
    recorded = {name: getattr(evaluation, name) for name in wanted}
    wanted |= {"byte": len(text), "eos": ends, "bos": begins - 1}
    recorded |= {name: evaluation.targets.get(name) for name in ("byte", "eos", "bos")}
    wrong = [
        f"{name}: {recorded[name]} instead of {wanted[name]}"
        for name in wanted
        if recorded[name] != wanted[name]
    ]
    if not wrong:
        return [], ""
    short = evaluation.bytes < len(text) or evaluation.targets["byte"] < len(text)
    reason = "the scored text is not the one that the settings give"
    if short:
        scored = min(evaluation.bytes, evaluation.targets["byte"])
        reason = f"{scored:,} of {len(text):,} held-out bytes were scored, as of a cropped held-out text"
    return [Problem(reason, wrong)], ""


def _copies(claim: Claim, quick: bool) -> tuple[list[Problem], str]:
    """Return the copies of scored documents and questions in the training text, and a phrase about them."""
    _, scored, _ = _text(claim)
    pieces = list(pieces_of({name: claim.results.shards(name) for name in claim.datasets}))
    sizes = {number: int(np.ptp(piece.bounds_T)) for number, piece in enumerate(pieces)}
    searched = [pieces[number] for number in sorted(_sample(sizes, QUICK if quick else None))]
    same = [piece for piece in searched if piece.dataset == claim.held_out]
    numbers, sample = _drawn(same or searched, QUICK_SAMPLE if quick else SAMPLE)
    documents, questions = scored.documents(), _questions(claim)
    everything = [*documents, *sample, *(text for _, text in questions)]
    none = np.full(len(everything), -1)
    none[len(documents) : len(documents) + len(numbers)] = numbers
    index = Index(everything, none, scored)
    found = index.search(searched, THREADS)
    share_D = index.share_D(found)
    held_out, training, asked = np.split(np.arange(len(none)), np.cumsum([len(documents), len(numbers)]))

    def place(d: int) -> str:
        number = int(found.where_D[d])
        piece = next(one for one in searched[::-1] if one.first <= number)
        return (
            f"{share_D[d]:.0%} of its word {LENGTH}-grams in {piece.place(number)}"
            if number >= 0
            else "in several"
        )

    problems = []
    for kind, copied_D in index.kinds(found).items():
        mine, theirs = np.flatnonzero(copied_D[held_out]), int(copied_D[training].sum())
        if not by_chance(len(mine), len(held_out), theirs, len(training)):
            edited = 1 - float(np.median(share_D[mine])) ** (1 / LENGTH)
            phrase = LOOKS_LIKE[kind].format(edited=edited)
            reason = f"{len(mine) / len(held_out):.0%} of the {len(held_out)} held-out documents {phrase}"
            reason += f" ({len(mine)}; of the training documents {theirs / max(1, len(training)):.1%} do)"
            lines = [f"held-out document {d}: {place(d)}" for d in mine[:SHOWN].tolist()]
            problems.append(Problem(reason, lines))
            break
    known = asked[(share_D[asked] >= ASKED) & (index.length_D[asked] >= ASKED_WORDS)]
    if len(known) > max(2, ASKED_OFTEN * len(asked)):
        reason = f"{len(known)} of {len(asked)} questions stand with their answers in the training text"
        lines = [f"{questions[d - asked[0]][0]}: {place(d)}" for d in known[:SHOWN].tolist()]
        problems.append(Problem(reason, lines))
    share = float(found.covered_N.mean()) if len(scored) else 0.0
    problems += _overlap(claim, share, whole=len(searched) == len(pieces))
    copies = int(index.kinds(found)[KINDS[-1]][held_out].sum())
    text = (
        f"of {len(documents)} held-out documents {copies} have a copy in the training text, as chance gives"
    )
    return (
        problems,
        f"{text}; {share:.1%} of their bytes are in stretches of {MATCH_BYTES} bytes that it has as well",
    )


def _drawn(pieces: Sequence[Piece], most: int) -> tuple[list[int], list[bytes]]:
    """Return the numbers of a sample of training documents, and their texts."""
    numbers = [piece.first + d for piece in pieces for d in range(len(piece.bounds_T) - 1)]
    chosen = sorted(random.Random(0).sample(numbers, min(most, len(numbers))))
    texts: dict[int, bytes] = {}
    for piece in pieces:
        own = [one for one in chosen if 0 <= one - piece.first < len(piece.bounds_T) - 1]
        all_texts = piece.text().documents() if own else []
        texts |= {one: all_texts[one - piece.first] for one in own}
    return [*texts], [*texts.values()]


def _overlap(claim: Claim, share: float, whole: bool) -> list[Problem]:
    """Return the problem of a recorded overlap that is not the one that was found."""
    recorded = claim.evaluation.results.get("overlap")
    if recorded is None or "overlap/share" not in recorded.metrics or not whole:
        return []
    was, all_text = recorded.metrics["overlap/share"], recorded.metrics["overlap/searched"] > ALL
    if was <= share + ROUNDING and (was >= share - ROUNDING or not all_text):
        return []
    return [
        Problem(
            f"the evaluation records an overlap of {was:.1%} with the training text, but it is {share:.1%}",
            [],
        )
    ]


# ------------------------------------------------------------------------------------- index and questions


def _index(claim: Claim, quick: bool) -> tuple[list[Problem], str]:
    """Return what the n-gram indexes of a run count beside the text that they may count."""
    run = claim.config.run(claim.run)
    problems = []
    for text, splits in (("split", ["ngram"]), ("full", ["ngram", "train"])):
        if run.model.ngram is None:
            continue
        folder = claim.results.ngram(run.dataset, run.model.ngram.counted, text)
        index, shards = open_index(folder), [Shards(claim.results.shards(run.dataset), one) for one in splits]
        counted, at = index.tables.text, 0
        same = len(counted) == sum(one.tokens for one in shards) and index.description.splits == splits
        symbols = symbols_of(shards[0].vocabulary)
        for tokens_N in (one for split in shards for one in split.maps):
            same = same and bool(np.array_equal(counted[at : at + len(tokens_N)], symbols[tokens_N]))
            at += len(tokens_N)
        if not same:
            raw, documents = counted.tobytes(), _text(claim)[1].documents()
            n = sum(one in raw for one in documents)
            reason = f"the n-gram index counts another text than the splits {' and '.join(splits)}"
            reason = (
                f"{reason}: {n / len(documents):.0%} of the {len(documents)} held-out documents are counted"
            )
            problems.append(Problem(reason, [str(folder)]))
    return problems, ""


def _questions(claim: Claim) -> list[tuple[str, bytes]]:
    """Return the place of each question of the tasks' files, and the question with its right answer."""
    asked = [one for task in claim.spec.evaluation.tasks.values() for one in texts(task)]
    return [(where, answered.encode()) for where, (_, answered) in asked]


def _told(claim: Claim, quick: bool) -> tuple[list[Problem], str]:
    """Return the tasks whose questions hold the text of their right answer."""
    problems = []
    for name, config in claim.spec.evaluation.tasks.items():
        if not isinstance(config, JsonlTask):
            continue
        plain = config.model_copy(update={"shots": 0, "chat": False})
        (task,) = tasks(name, plain, [])
        asked = [
            one
            for one in task.questions
            if len(one.choices) > 1 or len(one.choices[0].split()) >= ASKED_WORDS
        ]
        told = sum(map(_is_told, asked))
        if told >= TOLD * len(asked) and len(asked) >= TOLD_LEAST:
            reason = f"{told} of {len(asked)} questions of the task {name} hold the text of the right answer"
            problems.append(Problem(reason, [config.file]))
    return problems, ""


def _is_told(question: Question) -> bool:
    """Return whether the right answer stands in the question, and no other choice does."""
    stands = [
        choice.strip() in context for choice, context in zip(question.choices, question.contexts, strict=True)
    ]
    return stands[question.gold] and sum(stands) == 1
