"""Find the stretches of a text that stand in a training text, with the raw rows that they come from.

`spider_trust.text_index` finds the stretches. A stretch leads to a document of a shard, the ``.rows`` beside
the shard to a row of the raw file, and ``metadata.json`` to that file's SHA-256. ``trace.json`` has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from spider.common.results import Results
from spider.config import Config
from spider.data.shards import Shards, load_metadata
from spider_trust.documents import id_of, rows_of
from spider_trust.order import Order
from spider_trust.text_index import (
    SHORTEST,
    SPLITS,
    Occurrence,
    Piece,
    begins_of,
    described,
    occurrences,
    open_index,
    stretches,
    widths,
)
from spider_trust.traces import Place, Stretch, Trace

#: Occurrences of a stretch that are described.
PLACES = 3


@dataclass(frozen=True)
class Corpus:
    """The indexed training text of a dataset."""

    config: Config
    results: Results
    dataset: str
    splits: Sequence[str] = SPLITS
    order: Order | None = None
    """The order of the run that learned from it, if its steps are wanted."""

    @property
    def parts(self) -> list[str]:
        return list(self.config.parts(self.dataset))

    @cached_property
    def pieces(self) -> list[Piece]:
        """The pieces of all parts.

        Raises:
            ValueError: the text of a part is not indexed, or the index is of other text.
        """
        paths = [described(self.results, self.dataset, part) for part in self.parts]
        for path in paths:
            if not path.is_file():
                remedy = f"`snakemake --cores all text/{self.dataset}` builds it"
                raise ValueError(f"{path}: the training text of {self.dataset} has no index; {remedy}")
        folder = self.results.shards(self.dataset)
        return [piece for path in paths for piece in open_index(path, folder, self.splits)]

    @cached_property
    def _views(self) -> dict[str, Shards]:
        folder = self.results.shards(self.dataset)
        return {split: Shards(folder, split) for split in {piece.described.split for piece in self.pieces}}

    @cached_property
    def _files(self) -> dict[str, dict[str, str]]:
        files = load_metadata(self.results.shards(self.dataset)).source.get("files", [])
        return {file["part"]: file for file in files}

    def place(self, found: Occurrence, length: int) -> Place:
        """Return the place of a stretch of so many bytes."""
        view = self._views[found.split]
        path = self.results.shards(self.dataset) / found.split / f"{found.part}.bin"
        s = view.files.index(path)
        begins = begins_of(view, s)
        first = int(begins[found.document])
        ends = np.cumsum(widths(view.maps[s][first:][: found.begin + length], view.vocabulary), dtype=int)
        inside = np.searchsorted(ends, (found.begin, found.begin + length - 1), side="right")
        begin, last = (int(view.borders[s]) + first + inside).tolist()
        number = found.document - len(begins) + len(view.begins(s))
        known = number >= 0 and path.with_suffix(".rows").is_file()
        row = int(rows_of(view, s)[number]) if known else None
        tokens = begin, last + 1
        order = self.order if found.split == "train" else None
        file = self._files.get(found.part, {})
        return Place(
            dataset=self.dataset,
            split=found.split,
            part=found.part,
            document=found.document,
            tokens=tokens,
            row=row,
            id=None if row is None else id_of(self.config, self.results, self.dataset, found.part, row),
            reads=tuple(order.reads(view.digest, *tokens)) if order else (),
            file=file.get("name", ""),
            sha256=file.get("sha256", ""),
        )


def corpora(config: Config, results: Results, run: str | None, stage: str | None) -> list[Corpus]:
    """Return the texts that a run has learned from by the end of a stage, and those that it looks up.

    Without a run these are the texts of all datasets that are indexed.

    Raises:
        ValueError: a stage was trained on a stream or is not trained, or no dataset is indexed.
    """
    if run is None:
        stored = [name for name, one in config.datasets.items() if not one.source.STREAMED]
        indexed = [name for name in stored if any(described(results, name, "").parent.glob("*.json"))]
        if not indexed:
            targets = " or ".join(f"text/{name}" for name in stored)
            raise ValueError(f"no training text has an index; `snakemake --cores all {targets}` builds one")
        return [Corpus(config, results, name) for name in indexed]
    settings = config.run(run)
    names = config.learned(run, stage or settings.stages[-1].name)
    for name in names:
        if config.datasets[name].source.STREAMED:
            raise ValueError(f"{run}: was trained on the stream {name}, whose text is not stored")
    counted = settings.dataset if settings.model.ngram else None
    order = Order(config, run, stage)
    return [Corpus(config, results, name, SPLITS if name == counted else ("train",), order) for name in names]


def trace(
    text: bytes,
    sources: Sequence[Corpus],
    least: int,
    run: str | None = None,
    stage: str | None = None,
) -> Trace:
    """Find the stretches of at least so many bytes of a text that stand in these training texts.

    Raises:
        ValueError: the text or ``least`` is below `SHORTEST` bytes, or a text is not indexed.
    """
    if min(len(text), least) < SHORTEST:
        what = f"the text has {len(text)}" if len(text) < SHORTEST else f"--least is {least}"
        raise ValueError(f"a stretch to trace has at least {SHORTEST} bytes, but {what}")
    pieces = [piece for source in sources for piece in source.pieces]
    found = []
    covered = np.zeros(len(text), bool)
    for begin, end in stretches(pieces, text, least):
        covered[begin:end] = True
        count = 0
        places: list[Place] = []
        for source in sources:
            total, where = occurrences(source.pieces, text[begin:end], PLACES - len(places))
            count += total
            places += [source.place(one, end - begin) for one in where]
        words = text[begin:end].decode(errors="replace")
        found.append(Stretch(begin=begin, end=end, text=words, count=count, places=tuple(places)))
    return Trace(
        format=Trace.FORMAT,
        run=run,
        stage=stage,
        datasets=tuple(source.dataset for source in sources),
        text=text.decode(errors="replace"),
        least=least,
        share=float(covered.mean()),
        stretches=tuple(found),
    )
