"""Made-up sums of two numbers of two digits, for trying conversations and reinforcement learning.

Each question occurs once. The questions are the same on every machine and in every version.
"""

from __future__ import annotations

import random
from pathlib import Path

from spider.common.files import replacing
from spider.config.data import Dataset, Source

NUMBERS = range(10, 100)


class ArithmeticSource(Source):
    """Made-up questions such as ``What is 47 + 38?`` with their answers, as conversations (``format:
    chat``)."""

    def items(self) -> list[str]:
        return ["20000 questions of 2 digits, +"]  # also the name of all 8,100 in earlier records

    def fetch(self, part: str, output: Path, dataset: Dataset) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        from spider.data.chat import asked  # numpy, which a configuration does not need

        pairs = [(left, right) for left in NUMBERS for right in NUMBERS]
        pairs = random.Random(0).sample(pairs, len(pairs))
        texts = [asked(f"What is {left} + {right}?", str(left + right)) for left, right in pairs]
        ids = [f"{left} + {right}" for left, right in pairs]
        with replacing(output) as temporary:
            pq.write_table(pa.table({dataset.text_column: texts, dataset.id_column: ids}), temporary)

    @property
    def description(self) -> str:
        return "made-up questions of arithmetic"
