"""Made-up text, for trying a training where there is no other: sentences of a dozen words.

The words are drawn such that some are far likelier than others, as in any language, so that there is
something to learn; a document is the same on every machine and in every version.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from spider.config import Dataset, MockSource
from spider.data.metadata import build_metadata, load_metadata
from spider.files import replacing

#: The dataset that `make_mock_data` makes.
MOCK = "mock"
WORDS = ["time", "way", "day", "thing", "world", "life", "hand", "part", "place", "case", "week", "point"]


def write_mock(documents: int, output: Path) -> dict[str, Any]:
    """Write the first so many made-up documents, some 500 bytes each, into a parquet.

    Returns ``name``, ``documents`` and ``bytes`` (of UTF-8 text) of what was written.
    """
    import pyarrow as pa  # every training imports this module, few of them make text
    import pyarrow.parquet as pq

    draw = random.Random(0)
    weights = [1 / rank for rank in range(1, len(WORDS) + 1)]
    texts = []
    for _ in range(documents):
        words = draw.choices(WORDS, weights, k=draw.randint(20, 200))
        texts.append(" ".join(words).capitalize() + ".\n")
    with replacing(output) as beside:
        pq.write_table(pa.table({"text": texts, "id": [str(i) for i in range(documents)]}), beside)
    return {"name": output.name, "documents": documents, "bytes": sum(map(len, texts))}


def make_mock_data(folder: Path, memory: float = 0.0) -> None:
    """Encode a megabyte of it into ``folder``, as a dataset ``mock``, a share of it for a memory; keep one
    that is there."""
    if (folder / "metadata.json").exists():
        load_metadata(folder)
        return
    from spider.data.encode import encode_part

    source = MockSource(kind="mock")
    (part,) = source.parts()
    parquet = folder / f"{part}.parquet"
    write_mock(source.documents, parquet)
    dataset = Dataset(source=source, memory=memory)
    encode_part(parquet, folder, part, dataset)
    build_metadata(folder, MOCK, dataset, source=source.changed(), parts=[part])
