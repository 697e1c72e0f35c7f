"""Make a synthetic text with duplicates, and a table of what is true of each document.

A document is a function of (seed, its number), so any process writes any part, and a copy is made from its
original without reading it. The text has ten sources, pages of ten templates, families of programs, documents
that differ only in digits, and copies: exact ones, ones with other white space, and edited ones. Containment
and Jaccard similarity are counted over the word 5-grams of the text outside templates. A million documents
(1.3 GB) take two minutes on one core.

    python benchmarks/corpus.py FOLDER [--documents 1000000] [--seed 0] [--parts N]

FOLDER gets `parts/*.parquet`, `truth.parquet` and `heldout.jsonl`, whose passages are in 1% of the documents.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from itertools import accumulate, islice, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

#: Shares of the documents that are not copies; the others are copies.
KINDS = {"template": 0.20, "code": 0.08, "numbers": 0.05, "short": 0.05, "ordinary": 0.32}
#: Share of the documents of each source.
SOURCES = (0.20, 0.16, 0.14, 0.12, 0.10, 0.10, 0.07, 0.05, 0.04, 0.02)
TEMPLATES = 10
HEAD = "| name       | value    | unit  |"
#: Share of the pages of a template, and of the programs of a family, that come from one source.
AT_HOME = 0.6
#: Documents of a part, unless a number of parts is given.
PART = 50_000
PASSAGES = 1000
#: Edited copies have at least this many words outside a template, and this Jaccard similarity.
EDITABLE = 60
JACCARD = (0.7, 0.98)
FIELDS = {
    **{"part": pa.int32(), "row": pa.int32(), "id": pa.string(), "source": pa.int8(), "kind": pa.string()},
    **{"how": pa.string(), "original": pa.string(), "containment": pa.float64(), "jaccard": pa.float64()},
    "passage": pa.int32(),
}


class Block(NamedTuple):
    """A paragraph or a line. It is ``own`` if it is not part of a template."""

    words: list[str]
    own: bool = True
    prose: bool = True


Page = list[Block]


def render(page: Page, width: int, end: str = "\n", space: str = " ", frame: int = 12) -> str:
    """Return the text of a page with so many words a line, and so many in paragraphs of a template."""
    lines = []
    for words, own, prose in page:
        size = (width if own else frame) if prose else max(1, len(words))
        lines += [space.join(words[at : at + size]) for at in range(0, len(words), size)]
        if prose:
            lines.append("")
    return end.join(lines).rstrip() + end


def grams(text: str, n: int = 5) -> set[tuple[str, ...]]:
    """Return the word n-grams of a text; a shorter text is one gram."""
    words = re.findall(r"\w+", text.lower())
    return set(zip(*(words[i:] for i in range(n)), strict=False)) if len(words) >= n else {tuple(words)}


def own_text(page: Page) -> str:
    """Return the text of a page outside its template."""
    return "\n".join(" ".join(block.words) for block in page if block.own)


def containment(copy: set, original: set) -> float:
    """Return the share of the grams of ``copy`` that ``original`` has."""
    return len(copy & original) / len(copy)


# Words


@lru_cache(maxsize=1)
def lexicon() -> np.ndarray:
    """Return 2^20 words with the frequencies of Zipf's law; frequent words are short."""
    rng = random.Random("lexicon")
    onsets = [*"bcdfghjklmnprstvw", "st", "tr", "pr", "ch", "sh", "th", "gr", "pl"]
    vowels = [*"aaaeeeeiiioou", "ea", "ou", "ai", "é"]
    ends = ["", "", "", "n", "r", "s", "t", "l", "nd", "ng", "ck"]
    found: dict[str, None] = {}
    while len(found) < 30_000:
        syllables = 1 + int(rng.random() ** 1.5 * (1 + min(3, len(found) / 1500)))
        parts = (rng.choice(onsets) + rng.choice(vowels) + rng.choice(ends) for _ in range(syllables))
        found["".join(parts)] = None
    share = 1 / (2 + np.arange(len(found)))
    counts = np.diff(np.round(np.cumsum(share) / share.sum() * 2**20), prepend=0).astype(int)
    return np.repeat(np.array(list(found), object), counts)


def draw(rng: random.Random, count: int) -> list[str]:
    """Return so many words."""
    return lexicon()[np.frombuffer(rng.randbytes(4 * count), "<u4") >> 12].tolist()


def sentences(rng: random.Random, words: list[str]) -> list[str]:
    """Put capitals, commas and full stops into a list of words, and return it."""
    at = 0
    while at < len(words):
        end = min(len(words), at + rng.randint(5, 25))
        words[at] = words[at].capitalize()
        if end - at > 12:
            words[at + 6] += ","
        words[end - 1] += "."
        at = end
    return words


def paragraphs(rng: random.Random, words: list[str], own: bool = True) -> Page:
    """Cut words into paragraphs."""
    page = []
    while words:
        size = rng.randint(40, 90)
        page.append(Block(words[:size], own))
        words = words[size:]
    return page


@lru_cache(maxsize=1)
def phrases() -> list[list[str]]:
    """Return phrases that ordinary documents share."""
    rng = random.Random("phrases")
    return [draw(rng, rng.randint(5, 15)) for _ in range(3000)]


@lru_cache(maxsize=1)
def passages() -> list[list[str]]:
    """Return the passages of the held-out text."""
    rng = random.Random("passages")
    return [draw(rng, rng.randint(20, 40)) for _ in range(PASSAGES)]


# Documents that are not copies


def ordinary(rng: random.Random, passage: int | None) -> Page:
    """Return prose with up to two shared phrases, and perhaps a passage of the held-out text."""
    words = draw(rng, max(40, min(1500, int(rng.lognormvariate(5.0, 0.6)))))
    shared = [phrases()[int(3000 * rng.random() ** 3)] for _ in range(rng.randint(0, 2))]
    for some in shared + ([] if passage is None else [passages()[passage]]):
        at = rng.randint(0, len(words))
        words[at:at] = some
    return paragraphs(rng, sentences(rng, words))


def line(text: str, own: bool = True) -> Block:
    """Return a line that is not wrapped."""
    return Block(text.split(" "), own, prose=False)


@lru_cache(maxsize=TEMPLATES)
def template(number: int) -> list[Block | str]:
    """Return the blocks of a template; a string names what a page puts there."""
    rng = random.Random(f"template {number}")
    menu = " | ".join(word.capitalize() for word in draw(rng, rng.randint(6, 14)))
    notes = [line("* " + " ".join(draw(rng, rng.randint(6, 12))), own=False) for _ in range(4)]
    licence = paragraphs(rng, sentences(rng, draw(rng, rng.randint(60, 240))), own=False)
    frame, head = (line(text, own=False) for text in ("+------------+----------+-------+", HEAD))
    table = [frame, head, frame, "rows", frame] if number % 2 else []
    body = ["title", "date", "text", *notes[:2], *table, "text"]
    after = [*notes[2:], *licence]
    return [line(menu, own=False), line("", own=False), *(after + body if number % 3 == 0 else body + after)]


def filled_template(rng: random.Random, number: int) -> Page:
    """Return a page of a template. At least half of it is the template."""
    blocks = template(number)
    size = sum(len(block.words) for block in blocks if isinstance(block, Block))
    each = int(6 + (size / 2 - 31) * rng.random() ** 2)
    page: Page = []
    for block in blocks:
        if isinstance(block, Block):
            page.append(block)
        elif block == "title":
            page.append(Block(sentences(rng, draw(rng, rng.randint(3, 7)))))
        elif block == "date":
            day, author = rng.randint(1, 365), draw(rng, 1)[0]
            page.append(line(f"Published on day {day} by {author} | print this page", own=False))
        elif block == "text":
            page += paragraphs(rng, sentences(rng, draw(rng, each)))
        else:
            for unit in rng.sample(["kg", "m", "s", "W", "K"], rng.randint(1, 4)):
                page.append(line(f"| {draw(rng, 1)[0]:10} | {rng.randint(0, 99999):8} | {unit:5} |"))
    return page


LINES = """def {a}({b}, {c}={n}):
    if {b} > {n}:
        return {c} * {n} + {d}
    for {d} in range({n}):
        {c} += {b}[{d}] - {n}
    return {c}
    {a} = {b}.{c}({n}, {n})
    while {a} < {n} and {b} != {c}:
        {a}, {b} = {b}, {a} + {n}
    {d} = [{a} + {n} for {a} in {b}]
    assert {a} == {n}, "{b} {c}"
class {A}({B}):
    def {d}(self, {a}): return self.{c} + {n}
    print("{a}", {b}, {n})
    # {a} {b} {c} {d} {a} {c}
    raise ValueError("{a} {b} has {n} {c}")""".splitlines()


@lru_cache(maxsize=64)
def skeleton(family: int) -> tuple[list[str], list[str]]:
    """Return the lines that all programs of a family share (licence, imports), and patterns of the others."""
    rng = random.Random(f"family {family}")
    imports = [f"from {a}.{b} import {c}" for a, b, c in (draw(rng, 3) for _ in range(rng.randint(3, 8)))]
    licence = random.Random(f"licence {family % 12}")
    comments = ["# " + " ".join(draw(licence, 10)) for _ in range(licence.randint(4, 14))]
    return [*comments, "", "import numpy as np", *imports, ""], rng.choices(LINES, k=rng.randint(10, 45))


def program(rng: random.Random, family: int) -> Page:
    """Return a program: the licence, imports and skeleton of its family, with other names and numbers."""
    shared, patterns = skeleton(family)
    names = draw(rng, 24)
    page = [line(text, own=False) for text in shared]
    for pattern in patterns:
        a, b, c, d = rng.sample(names, 4)
        text = re.sub(r"{n}", lambda _: str(rng.randint(0, 999)), pattern)
        page.append(line(text.format(a=a, b=b, c=c, d=d, A=a.title(), B=b.title())))
    return [*page, line('if __name__ == "__main__":'), line("    main()")]


STATEMENTS = (
    "What is {} + {}? The answer is {}.",
    "INFO request {} of user {} took {} ms",
    "The temperature at the station was {}.{} degrees and the humidity was {} percent.",
    "{}, {}, {}",
)


def numbers(rng: random.Random) -> Page:
    """Return lines that differ from those of other documents only in digits."""
    form = rng.choice(STATEMENTS)
    return [line(form.format(*(rng.randint(10, 9999) for _ in range(3)))) for _ in range(rng.randint(2, 30))]


# Copies


def edited_words(rng: random.Random, page: Page, count: int) -> Page:
    """Substitute, insert and delete so many words outside the template."""
    page = [block._replace(words=block.words.copy()) if block.own else block for block in page]
    own = [block.words for block in page if block.own and block.words]
    ends = list(accumulate(map(len, own)))
    for words in rng.choices(own, cum_weights=ends, k=count):
        at = rng.randint(0, max(0, len(words) - 1))
        words[at : at + rng.randint(0, 1)] = draw(rng, rng.randint(0, 1) if len(words) > 1 else 1)
    return page


def moved(rng: random.Random, page: Page) -> Page:
    """Move one to three blocks to another place."""
    count = rng.randint(1, 3)
    at = rng.randint(0, max(0, len(page) - count))
    rest = page[:at] + page[at + count :]
    to = rng.randint(0, len(rest))
    return rest[:to] + page[at : at + count] + rest[to:]


def truncated(page: Page, keep: int) -> Page:
    """Keep so many words outside the template, from the beginning."""
    short = []
    for block in page:
        short.append(block._replace(words=block.words[: max(0, keep)]) if block.own else block)
        keep -= len(block.words) if block.own else 0
    return [block for block in short if block.words]


def edited(rng: random.Random, page: Page) -> tuple[str, Page]:
    """Return how a page was edited, and the edited page."""
    size = sum(len(block.words) for block in page if block.own)
    how = rng.choices(["words", "moved", "framed", "truncated", "mixed"], [5, 1, 2, 1, 1])[0]
    if how == "truncated" or how == "mixed":
        page = truncated(page, int(size * rng.uniform(0.7, 0.97)))
    if how == "moved" or how == "mixed":
        page = moved(rng, page)
    if how == "framed":
        header, footer = ([Block(sentences(rng, draw(rng, rng.randint(1, 1 + size // 8))))] for _ in range(2))
        page = rng.choice([header + page, page + footer, header + page + footer])
    if how == "words" or how == "mixed":
        page = edited_words(rng, page, 1 + int(size * rng.uniform(0, 0.04)))
    return how, page


# The whole


class Document(NamedTuple):
    """A document and what is true of it. A copy has the place of its original and their similarities."""

    text: str
    own: str
    kind: str
    how: str | None = None
    original: int | None = None
    containment: float | None = None
    jaccard: float | None = None
    passage: int | None = None


class Corpus:
    """The plan of a corpus. Documents have a number, which decides their text, and a place in the order."""

    def __init__(self, documents: int, seed: int = 0, parts: int | None = None) -> None:
        self.documents, self.seed = documents, seed
        rng = np.random.default_rng(seed)
        counts = [round(share * documents) for share in KINDS.values()]
        distinct = sum(counts)
        self.first_ordinary = distinct - counts[-1]
        self.kinds = np.repeat(np.arange(len(KINDS)), counts)
        families = max(4, counts[1] // 40)
        template = (TEMPLATES * rng.random(distinct) ** 1.5).astype(int)
        self.groups = np.where(self.kinds == 0, template, (families * rng.random(distinct) ** 2).astype(int))
        sizes = np.minimum(199, rng.random(documents - distinct) ** (-1 / 1.2)).astype(int)
        copied = np.repeat(rng.permutation(distinct)[: len(sizes)], sizes)[: len(sizes)]
        self.originals = np.concatenate([np.arange(distinct), copied])
        self.numbers, self.sources, self.places = self._order(rng, distinct)
        self.starts = self._cut() if parts is None else np.arange(parts) * documents // parts

    def _order(self, rng: np.random.Generator, distinct: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the number and the source of each place, and the place of each number."""
        key = rng.random(self.documents)
        bounds = np.cumsum((0, *SOURCES))
        home = self.groups % len(SOURCES)
        stays = (self.kinds < 2) & (rng.random(distinct) < AT_HOME)
        key[:distinct] = np.where(
            stays, bounds[home] + np.array(SOURCES)[home] * key[:distinct], key[:distinct]
        )
        numbers = np.argsort(key, kind="stable")
        sources = np.searchsorted(bounds[1:-1], key[numbers], side="right")
        places = np.argsort(numbers)
        # Of the places of an original and its copies, the original gets the first.
        every = np.arange(self.documents)
        places[np.lexsort((every, self.originals))] = places[np.lexsort((places, self.originals))]
        return np.argsort(places), sources, places

    def _cut(self) -> np.ndarray:
        """Return the first place of each part. A part has one source."""
        ends = np.searchsorted(self.sources, np.arange(len(SOURCES)), side="right")
        starts = (0, *ends[:-1])
        return np.concatenate([np.arange(*each, PART) for each in zip(starts, ends, strict=True)])

    def part(self, number: int) -> range:
        """Return the places of a part."""
        ends = [*self.starts[1:], self.documents]
        return range(int(self.starts[number]), int(ends[number]))

    def distinct(self, number: int) -> tuple[Page, int, int | None]:
        """Return a document that is not a copy, the words of its lines, and the passage that it holds."""
        rng = random.Random(f"{self.seed}/{number}")
        kind, group = list(KINDS)[self.kinds[number]], int(self.groups[number])
        width = rng.randint(9, 14)
        passage = None
        if kind == "template":
            page = filled_template(rng, group)
        elif kind == "code":
            page = program(rng, group)
        elif kind == "numbers":
            page = numbers(rng)
        elif kind == "short":
            page = [Block(sentences(rng, draw(rng, rng.randint(4, 30))))]
        else:
            among = number - self.first_ordinary
            passage = among % PASSAGES if among < self.documents // 100 else None
            page = ordinary(rng, passage)
        return page, width, passage

    def document(self, place: int) -> Document:
        """Return the document at a place."""
        number = int(self.numbers[place])
        original = int(self.originals[number])
        page, width, passage = self.distinct(original)
        own = own_text(page)
        if original == number:
            return Document(render(page, width), own, list(KINDS)[self.kinds[number]], passage=passage)
        at = int(self.places[original])
        rng = random.Random(f"{self.seed}/{number}")
        if own.count(" ") < EDITABLE or rng.random() < 0.35:
            if rng.random() < 0.5:
                return Document(render(page, width), own, "exact", "same", at, 1.0, 1.0, passage)
            width, end, space = (
                rng.randint(6, 14),
                rng.choice(["\n", "\r\n", " \n"]),
                rng.choice([" ", "  ", "\t"]),
            )
            text = render(page, width, end, space, frame=width)
            return Document(text, own, "exact", "spaces", at, 1.0, 1.0, passage)
        before = grams(own)
        while True:
            how, changed = edited(rng, page)
            own = own_text(changed)
            after = grams(own)
            common = len(before & after)
            jaccard = common / len(before | after)
            if JACCARD[0] <= jaccard <= JACCARD[1]:
                width = rng.choice([width, rng.randint(6, 14)])
                text = render(changed, width)
                return Document(text, own, "edited", how, at, common / len(after), jaccard)

    def rows(self, part: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the text and the truth of each document of a part."""
        for row, place in enumerate(self.part(part)):
            document = self.document(place)
            truth = {name: getattr(document, name) for name in FIELDS if hasattr(document, name)}
            if document.original is not None:
                truth["original"] = name_of(document.original)
            truth |= {"part": part, "row": row, "id": name_of(place), "source": int(self.sources[place])}
            yield document.text, truth


def name_of(place: int) -> str:
    """Return the id of a document."""
    return f"doc-{place:07d}"


def write_part(corpus: Corpus, part: int, folder: Path) -> tuple[pa.Table, int]:
    """Write a part; return the truth of its documents and the bytes of its text."""
    schema = pa.schema({"text": pa.string(), "id": pa.string(), "source": pa.int8()})
    tables, size = [], 0
    with pq.ParquetWriter(folder / f"{part:03d}.parquet", schema, compression="zstd") as file:
        rows = corpus.rows(part)
        while some := list(islice(rows, 5000)):
            texts = [text for text, _ in some]
            truth = pa.Table.from_pylist([row for _, row in some], pa.schema(FIELDS))
            file.write_table(pa.table([pa.array(texts), truth["id"], truth["source"]], schema=schema))
            tables.append(truth)
            size += sum(len(text.encode()) for text in texts)
    return pa.concat_tables(tables), size


def write(folder: Path, corpus: Corpus, processes: int | None = None) -> int:
    """Write a corpus into a folder; return the bytes of its text."""
    (folder / "parts").mkdir(parents=True)
    lines = [
        json.dumps({"id": f"passage-{i}", "text": " ".join(words)}) for i, words in enumerate(passages())
    ]
    (folder / "heldout.jsonl").write_text("\n".join(lines) + "\n")
    parts = range(len(corpus.starts))
    with ProcessPoolExecutor(processes) as pool:
        done = list(pool.map(write_part, repeat(corpus), parts, repeat(folder / "parts")))
    pq.write_table(pa.concat_tables(truth for truth, _ in done), folder / "truth.parquet")
    return sum(size for _, size in done)


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("folder", type=Path)
    options.add_argument("--documents", type=int, default=1_000_000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--parts", type=int, help="cut into so many parts (default: parts of sources)")
    chosen = options.parse_args()
    size = write(chosen.folder, Corpus(chosen.documents, chosen.seed, chosen.parts))
    print(f"{size / 1e6:.1f} MB of text")


if __name__ == "__main__":
    main()
