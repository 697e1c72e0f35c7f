"""Parquet files of a Hugging Face dataset repository, read while a model trains."""

from __future__ import annotations

from typing import Any, ClassVar

from spider.config.block import wrong_key
from spider.config.data import Dataset
from spider.data.sources.hub import HubSource


class StreamSource(HubSource):
    """Train directly from the hub, without storing the files. Each epoch reads the files in a new order."""

    STREAMED: ClassVar = True

    def items(self) -> list[str]:
        return []

    def probe(self, items: list[str], dataset: Dataset) -> int:
        super().probe(self.files, dataset)
        return 0  # Nothing is stored.

    def batches(self, dataset: Dataset, **options: Any) -> Any:
        from spider.data.stream import StreamLoader

        return StreamLoader(dataset, self.addresses(self.files_of_parts()), **options)

    def check(self, dataset: Dataset) -> None:
        if self.take is not None:
            limits = (
                "is read as far as it is trained on; limit the tokens of the stages, or download the text"
            )
            raise wrong_key("source.take", f"a stream {limits}: source.kind: hub")
        super().check(dataset)
        remedy = "leave it out, or download the text: source.kind: hub"
        chat = dataset.format == "chat"
        refused = {
            "like": (dataset.like, f"{dataset.like} is a stream, which is not stored; give a source"),
            "temp": (dataset.temp, "a stream is not stored, so nothing can be deleted; leave it out"),
            "ngram": (dataset.ngram, f"a stream is not stored, so it cannot be counted; {remedy}"),
            "format": (chat, "a stream can only be text; download the conversations: source.kind: hub"),
            "tokenizer": (dataset.tokenizer, f"a stream is always encoded as bytes; {remedy}"),
        }
        for key, (is_set, problem) in refused.items():
            if is_set:
                raise wrong_key(key, problem)

    @property
    def description(self) -> str:
        return f"a stream of {self.repo} at {self.revision}, not stored"
