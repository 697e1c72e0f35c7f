"""Find held-out text in what a model has learned from.

*The rule of the split.* Each raw file is read and encoded again. Each document of the shards has to be one
of the raw file, in its tokens and in the split that the rule gives. Each document of the raw file has to be
there, except for those that cleaning removed (`spider.audit.rule`).

*Copies.* The scored documents are searched for in all text that the model learned from, with the n-gram
split. They are found with the same text, with the same words, as near copies, and in pieces
(`spider.audit.copies`). Training documents have such copies of each other as well: licences, pages of a
template. So the scored documents are compared with a sample of training documents of the same dataset. The
check fails if they have more copies, and chance gives such a difference once in 10,000 times at most.

*Stretches of 50 bytes.* Their share of the scored bytes is reported. Licences and inherited docstrings are
normal, so the check fails only if the evaluation recorded another share.

*The scored text* has to be the beginning of the validation split, as the settings give it.

*The n-gram index* has to be counted from its splits alone.

*Questions* of the tasks' files must not hold the text of their own right answer. They must not stand in the
training text with their answers. A question of 8 words or more does if a document has 80% of its 5-grams. One
question in twenty may.

A quick check reads the first rows of a sample of the parts, and a sample of the training text.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow.parquet as pq

from spider.audit.claim import Claim
from spider.audit.copies import KINDS, Found, Index, by_chance, drawn, pieces_of
from spider.audit.record import Finding
from spider.audit.rule import compare, faults
from spider.cleaning.minhash import LENGTH
from spider.config.tasks import JsonlTask
from spider.data.shards import Shards, load_metadata
from spider.evaluation.overlap import MATCH_BYTES
from spider.evaluation.questions import Question, tasks, texts
from spider.evaluation.text import Text, validation_stream
from spider.ngram.layout import symbols_of
from spider.ngram.store import open_index
from spider.tokens import BYTES

THREADS = 2
#: Bytes of raw files, and bytes of training text, that a quick check reads.
QUICK_RAW, QUICK_TEXT = 1 << 20, 4 << 20
#: Training documents that the scored ones are compared with, and in a quick check.
SAMPLE, QUICK_SAMPLE = 4096, 512
#: Lines of details of a problem.
SHOWN = 10
#: What copies of held-out documents look like, by their kind (`spider.audit.copies`).
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

T = TypeVar("T")


class Problem(NamedTuple):
    """A fault: the part of a sentence that states it, and its places."""

    reason: str
    details: list[str]


#: Problems, and a phrase about what was checked; it may be empty.
Step = tuple[list[Problem], str]


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


def _rule(claim: Claim, quick: bool) -> Step:
    """Return what differs from the rule of the split."""
    parts: list[tuple[str, str, int | None]] = []
    without, of, problems = 0, 0, []
    for name in dict.fromkeys([*claim.datasets, claim.held_out]):
        known, raw = list(claim.config.parts(name)), claim.config.raw(name)
        described = load_metadata(claim.results.shards(name))
        if more := {shard.part for split in described.splits.values() for shard in split.shards} - {*known}:
            has = "has shards of parts that its source does not have"
            problems.append(Problem(f"{name} {has}: {', '.join(sorted(more))}", []))
        files = {part: claim.results.raw(raw, part) for part in known if not described.imported}
        sizes = {part: path.stat().st_size for part, path in files.items() if path.exists()}
        without, of = without + len(known) - len(sizes), of + len(known)
        for part in _sample(sizes, QUICK_RAW if quick else None):
            rows = pq.ParquetFile(files[part]).metadata.num_rows if quick else 0
            parts.append((name, part, rows * QUICK_RAW // max(QUICK_RAW, sizes[part]) if quick else None))
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(lambda part: compare(claim, *part), parts))
    problems += [Problem(reason, places[:SHOWN]) for reason, places in faults(found)]
    which = f"the first documents of {len(parts)} of {of}" if quick else f"each document of {len(parts)}"
    phrase = f"{which} parts {'are' if quick else 'is'} in the split that the rule gives"
    absent = f"; the rule could not be computed again for {without} parts, whose raw text is not here"
    return problems, phrase + (absent if without else "")


def _sample(sizes: Mapping[T, int], most: int | None) -> list[T]:
    """Return a random sample of about ``most`` bytes, in its order; all without a limit."""
    names = random.Random(0).sample([*sizes], len(sizes))
    before = np.cumsum([0, *(sizes[name] for name in names)])
    chosen = {name for name, size in zip(names, before, strict=False) if most is None or size < most}
    return [name for name in sizes if name in chosen]


def _text(claim: Claim) -> tuple[np.ndarray, Text, str]:
    """Return the held-out text that the settings give, in ids and as text, and the digest of its dataset."""
    settings, folder = claim.spec.evaluation, claim.results.shards(claim.held_out)
    tokens_N, digest = validation_stream(folder, settings.max_bytes, BYTES, settings.largest_group)
    return tokens_N, Text.of(tokens_N, BYTES), digest


def _scored(claim: Claim, quick: bool) -> Step:
    """Return how the scored text differs from the one that the settings give."""
    evaluation = claim.evaluation
    tokens_N, text, digest = _text(claim)
    begins, ends = (int(np.count_nonzero(tokens_N == one)) for one in (BYTES.bos, BYTES.eos))
    wanted = {"bytes": len(text), "documents": begins, "data_digest": digest}
    wanted["text_sha256"] = hashlib.sha256(text.bytes_N.tobytes()).hexdigest()
    recorded = {name: getattr(evaluation, name) for name in wanted} | evaluation.targets
    wanted |= {"byte": len(text), "eos": ends, "bos": begins - 1}
    wrong = {name: f"{name}: {recorded.get(name)} instead of {value}" for name, value in wanted.items()}
    wrong = {name: line for name, line in wrong.items() if recorded.get(name) != wanted[name]}
    size = min(evaluation.bytes, evaluation.targets.get("byte", 0))
    reason = "the scored text is not the one that the settings give"
    if size < len(text):
        reason = f"{size:,} of {len(text):,} held-out bytes were scored, as of a cropped held-out text"
    return [Problem(reason, [*wrong.values()])] if wrong else [], ""


# ------------------------------------------------------------------------------------------------- copies


def _copies(claim: Claim, quick: bool) -> Step:
    """Return the copies of scored documents and of questions in the training text."""
    _, text, _ = _text(claim)
    pieces = list(pieces_of({name: claim.results.shards(name) for name in claim.datasets}))
    bytes_per_token = {name: _bytes_per_token(claim, name) for name in claim.datasets}
    sizes = {
        number: int(np.ptp(piece.bounds_T) * bytes_per_token[piece.dataset])
        for number, piece in enumerate(pieces)
    }
    searched = [pieces[number] for number in _sample(sizes, QUICK_TEXT if quick else None)]
    raw = claim.config.raw(claim.held_out)
    alike = [piece for piece in searched if claim.config.raw(piece.dataset) == raw]
    sample = drawn(alike or searched, QUICK_SAMPLE if quick else SAMPLE)
    asked = [one for task in claim.spec.evaluation.tasks.values() for one in texts(task)]
    groups = text.documents(), [*sample.values()], [answered.encode() for _, (_, answered) in asked]
    own_D = np.concatenate([np.full(len(groups[0]), -1), [*sample], np.full(len(asked), -1)]).astype(np.int64)
    index = Index([one for group in groups for one in group], own_D, text)
    found = index.search(searched, THREADS)
    copied, phrase = _copied(found, len(groups[0]), len(sample))
    problems = copied + _asked(found, [where for where, _ in asked])
    share = float(found.covered_N.mean())
    problems += _overlap(claim, share) if len(searched) == len(pieces) else []
    stretches = f"{share:.1%} of their bytes are in stretches of {MATCH_BYTES} bytes that it has as well"
    return problems, f"{phrase}; {stretches}"


def _bytes_per_token(claim: Claim, name: str) -> float:
    """Return the mean number of bytes that a token of a dataset stands for."""
    splits = load_metadata(claim.results.shards(name)).splits.values()
    return sum(one.bytes for one in splits) / max(1, sum(one.tokens for one in splits))


def _copied(found: Found, held_out: int, training: int) -> Step:
    """Return whether the first documents have more copies than the next, which are of the training text."""
    kinds = {
        kind: np.split(copied_D, [held_out, held_out + training]) for kind, copied_D in found.kinds.items()
    }
    counts = [(int(mine_D.sum()), int(theirs_D.sum())) for mine_D, theirs_D, _ in kinds.values()]
    if all(by_chance(mine, held_out, theirs, training) for mine, theirs in counts):
        phrase = f"of {held_out} held-out documents {counts[-1][0]} have a copy in the training text"
        return [], f"{phrase}, no more than training documents have"
    # The kind of most copies gives the name. It includes the kinds before it.
    at = int(np.diff([mine for mine, _ in counts], prepend=0).argmax())
    copied_D = np.flatnonzero(kinds[KINDS[at]][0])
    edited = 1 - float(np.median(found.share_D[copied_D])) ** (1 / LENGTH)
    reason = f"{len(copied_D) / held_out:.0%} of the {held_out} held-out documents "
    reason += LOOKS_LIKE[KINDS[at]].format(edited=edited)
    reason += f" ({len(copied_D)}; of the training documents {counts[at][1] / max(1, training):.1%} do)"
    return [
        Problem(reason, [f"held-out document {d}: {found.place(d)}" for d in copied_D[:SHOWN].tolist()])
    ], ""


def _asked(found: Found, places: list[str]) -> list[Problem]:
    """Return whether the last documents, which are questions from these places, are in the training text."""
    first = len(found.share_D) - len(places)
    known = (found.share_D >= ASKED) & (found.length_D >= ASKED_WORDS)
    asked = [f"{places[d - first]}: {found.place(d)}" for d in np.flatnonzero(known).tolist() if d >= first]
    if len(asked) <= max(2, ASKED_OFTEN * len(places)):
        return []
    reason = f"{len(asked)} of {len(places)} questions stand with their answers in the training text"
    return [Problem(reason, asked[:SHOWN])]


def _overlap(claim: Claim, share: float) -> list[Problem]:
    """Return whether the evaluation records another overlap, which may be of a part of the training text."""
    recorded = claim.evaluation.results.get("overlap")
    was = recorded.metrics.get("overlap/share") if recorded else None
    if recorded is None or was is None or was <= share + ROUNDING:
        whole = recorded is not None and recorded.metrics.get("overlap/searched", 0) > ALL
        if was is None or not whole or was >= share - ROUNDING:
            return []
    reason = f"the evaluation records an overlap of {was:.1%} with the training text, but it is {share:.1%}"
    return [Problem(reason, [])]


# ------------------------------------------------------------------------------------- index and questions


def _index(claim: Claim, quick: bool) -> Step:
    """Return what the n-gram indexes of a run count beside the text that they may count."""
    run, problems = claim.config.run(claim.run), []
    if run.model.ngram is None:
        return [], ""
    for name, splits in INDEXES.items():
        index = open_index(claim.results.ngram(run.dataset, run.model.ngram.counted, name))
        files = [one for split in splits for one in Shards(claim.results.shards(run.dataset), split).maps]
        symbols, counted = (
            symbols_of(load_metadata(claim.results.shards(run.dataset)).vocabulary),
            index.tables.text,
        )
        pieces = np.split(counted, np.cumsum([len(tokens_N) for tokens_N in files]))
        same = all(np.array_equal(piece, symbols[one]) for piece, one in zip(pieces, files, strict=False))
        if not same or len(pieces[-1]) or index.description.splits != splits:
            raw, documents = counted.tobytes(), _text(claim)[1].documents()
            share = sum(one in raw for one in documents) / len(documents)
            reason = f"the n-gram index counts another text than the splits {' and '.join(splits)}"
            reason += f", with {share:.0%} of the {len(documents)} held-out documents"
            problems.append(Problem(reason, [str(index.folder)]))
    return problems, ""


def _told(claim: Claim, quick: bool) -> Step:
    """Return the tasks whose questions hold the text of their right answer."""
    problems = []
    for name, config in claim.spec.evaluation.tasks.items():
        if not isinstance(config, JsonlTask):
            continue
        (task,) = tasks(name, config.model_copy(update={"shots": 0, "chat": False}))
        asked = [one for one in task.questions if len(one.choices) > 1 or _words(one) >= ASKED_WORDS]
        told = sum(map(_is_told, asked))
        if told >= TOLD * len(asked) and len(asked) >= TOLD_LEAST:
            reason = f"{told} of {len(asked)} questions of the task {name} hold the text of the right answer"
            problems.append(Problem(reason, [config.file]))
    return problems, ""


def _words(question: Question) -> int:
    return len(question.choices[question.gold].split())


def _is_told(question: Question) -> bool:
    """Return whether the right answer stands in the question, and no other choice does."""
    pairs = zip(question.choices, question.contexts, strict=True)
    stands = [choice.strip() in context for choice, context in pairs]
    return stands[question.gold] and sum(stands) == 1
