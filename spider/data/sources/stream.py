"""Parquet files of a Hugging Face dataset repository, read while a model trains."""

from __future__ import annotations

from decimal import Decimal
from typing import Any, ClassVar

from spider.config.block import wrong_key
from spider.config.data import Dataset
from spider.data.listing import sections
from spider.data.sources.hub import HubSource


class StreamSource(HubSource):
    """Train directly from the hub, without storing the files. Each epoch reads the text in a new order."""

    STREAMED: ClassVar = True

    def items(self) -> list[str]:
        return []

    def probe(self, items: list[str], dataset: Dataset) -> int:
        super().probe(self.files, dataset)
        return 0  # Nothing is stored.

    def batches(self, dataset: Dataset, **options: Any) -> Any:
        from spider.data.stream import StreamLoader

        section = sections(self.take)[-1]._replace(first=Decimal(0)) if self.take else None
        return StreamLoader(dataset, self.addresses(self.files_of_parts()), section, **options)

    def check(self, dataset: Dataset) -> None:
        super().check(dataset)
        remedy = "leave it out, or download the text: source.kind: hub"
        cleaned = dataset.cleaning is not None and dataset.cleaning.removes
        chat = dataset.format == "chat"
        refused = {
            "like": (dataset.like, f"{dataset.like} is a stream, which is not stored; give a source"),
            "temp": (dataset.temp, "a stream is not stored, so nothing can be deleted; leave it out"),
            "ngram": (dataset.ngram, f"a stream is not stored, so it cannot be counted; {remedy}"),
            "format": (chat, "a stream can only be text; download the conversations: source.kind: hub"),
            "cleaning": (cleaned, "a stream compares no documents; leave out all of it but filters"),
        }
        for key, (is_set, problem) in refused.items():
            if is_set:
                raise wrong_key(key, problem)

    @property
    def description(self) -> str:
        return f"a stream of {self.repo} at {self.revision}, not stored"
