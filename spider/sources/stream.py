"""Parquet files of a Hugging Face dataset repository, read while a model trains."""

from __future__ import annotations

from typing import Any, ClassVar

from spider.config.block import wrong_key
from spider.config.data import Dataset
from spider.sources.hub import HubSource


class StreamSource(HubSource):
    """Train straight from the hub with ``datasets`` streaming. Nothing is downloaded first or kept, and each
    epoch reads the files in a new order."""

    STREAMED: ClassVar = True

    def items(self) -> list[str]:
        return []

    def batches(self, dataset: Dataset, **place: Any) -> Any:
        from spider.data.hub import HubFile
        from spider.data.stream import StreamLoader

        files = [HubFile(self.repo, self.revision, file) for file in self.files]
        return StreamLoader(dataset, files, **place)

    def check(self, dataset: Dataset) -> None:
        remedy = "leave it out, or download the text: source.kind: hub"
        if dataset.like:
            raise wrong_key("like", f"{dataset.like} is a stream, and nothing of it is kept; give a source")
        if dataset.ngram:
            raise wrong_key("ngram", f"a stream is read once and has no shards to keep; {remedy}")
        if dataset.format == "chat":
            raise wrong_key("format", "a stream is of text; download the conversations: source.kind: hub")
        if dataset.tokenizer:
            raise wrong_key("tokenizer", f"a stream is read once, as bytes; {remedy}")

    @property
    def description(self) -> str:
        return f"a stream of {self.repo} at {self.revision}, nothing of it is kept"
