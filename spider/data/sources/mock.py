"""Made-up text for trying a training: sentences of a dozen words.

Some words are drawn far more often than others, as in any language, so a model can learn something. A
document is the same on every machine and in every version.
"""

from __future__ import annotations

import random
from pathlib import Path

from spider.common.files import replacing
from spider.config.data import Dataset, Source

#: Name of the dataset of `make_mock_data`.
MOCK = "mock"
#: Number of documents, of about 500 bytes each.
DOCUMENTS = 2000
WORDS = ["time", "way", "day", "thing", "world", "life", "hand", "part", "place", "case", "week", "point"]


class MockSource(Source):
    """Made-up text for trying things. It is the same on every machine, and takes a second to write."""

    def items(self) -> list[str]:
        return [f"{DOCUMENTS} documents"]

    def fetch(self, part: str, output: Path, dataset: Dataset) -> None:
        write_mock(output)

    @property
    def description(self) -> str:
        return "made-up text"


def write_mock(output: Path) -> None:
    """Write the made-up documents into a parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = random.Random(0)
    weights = [1 / rank for rank in range(1, len(WORDS) + 1)]
    texts = []
    for _ in range(DOCUMENTS):
        words = rng.choices(WORDS, weights, k=rng.randint(20, 200))
        texts.append(" ".join(words).capitalize() + ".\n")
    with replacing(output) as temporary:
        pq.write_table(pa.table({"text": texts, "id": [str(i) for i in range(DOCUMENTS)]}), temporary)


def make_mock_data(folder: Path, ngram: float = 0.0) -> None:
    """Encode a megabyte of made-up text into ``folder``, as a dataset ``mock``.

    The share ``ngram`` of its documents is for the n-gram index. An existing dataset is kept.
    """
    from spider.data.encode import encode_part
    from spider.data.shards import build_metadata, load_metadata

    if (folder / "metadata.json").exists():
        load_metadata(folder)
        return
    source = MockSource(kind="mock")
    (part,) = source.parts()
    parquet = folder / f"{part}.parquet"
    write_mock(parquet)
    dataset = Dataset(source=source, ngram=ngram)
    encode_part(parquet, folder, part, dataset)
    build_metadata(folder, MOCK, dataset, source=source.changed(), parts=[part])
