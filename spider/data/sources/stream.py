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
        from spider.data.hub import HubFile
        from spider.data.stream import StreamLoader

        lock = self.locked()
        revision = lock.commit if lock else self.revision
        files = [HubFile(self.repo, revision, file) for file in self.files_of_parts()]
        return StreamLoader(dataset, files, **options)

    def check(self, dataset: Dataset) -> None:
        if self.take is not None:
            limits = (
                "is read as far as it is trained on; limit the tokens of the stages, or download the text"
            )
            raise wrong_key("source.take", f"a stream {limits}: source.kind: hub")
        super().check(dataset)
        remedy = "leave it out, or download the text: source.kind: hub"
        if dataset.like:
            raise wrong_key("like", f"{dataset.like} is a stream, which is not stored; give a source")
        if dataset.temp:
            raise wrong_key("temp", "a stream is not stored, so nothing can be deleted; leave it out")
        if dataset.ngram:
            raise wrong_key("ngram", f"a stream is not stored, so it cannot be counted; {remedy}")
        if dataset.format == "chat":
            raise wrong_key(
                "format", "a stream can only be text; download the conversations: source.kind: hub"
            )
        if dataset.tokenizer:
            raise wrong_key("tokenizer", f"a stream is always encoded as bytes; {remedy}")

    @property
    def description(self) -> str:
        return f"a stream of {self.repo} at {self.revision}, not stored"
