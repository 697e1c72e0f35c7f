"""Made-up questions of arithmetic, with answers, for trying conversations and reinforcement learning.

Each question occurs once. The questions are the same on every machine and in every version.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated

from pydantic import Field

from spider.common.files import replacing
from spider.config.block import Positive
from spider.config.data import Dataset, Source


class ArithmeticSource(Source):
    """Made-up questions such as ``What is 47 + 38?`` with their answers, as conversations (``format:
    chat``)."""

    questions: Positive = 20_000
    """Number of questions, or all that there are if they are fewer."""
    digits: Annotated[int, Field(ge=1, le=6)] = 2
    """Digits of both numbers."""
    operations: Annotated[str, Field(pattern=r"^[-+*]+$")] = "+"
    """Operations that the questions ask for, such as ``+-*``."""

    def items(self) -> list[str]:
        return [f"{self.questions} questions of {self.digits} digits, {self.operations}"]

    def fetch(self, part: str, output: Path, dataset: Dataset) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        from spider.data.chat import asked  # numpy, which a configuration does not need

        questions = list(self._questions())
        texts = [asked(f"What is {a} {sign} {b}?", str(_result(a, sign, b))) for a, sign, b in questions]
        ids = [" ".join(map(str, question)) for question in questions]
        with replacing(output) as temporary:
            pq.write_table(pa.table({dataset.text_column: texts, dataset.id_column: ids}), temporary)

    def _questions(self) -> list[tuple[int, str, int]]:
        """Return different questions, in a shuffled order."""
        first, end = (0 if self.digits == 1 else 10 ** (self.digits - 1)), 10**self.digits
        numbers = end - first
        total = numbers * numbers * len(self.operations)
        chosen = random.Random(0).sample(range(total), min(total, self.questions))
        questions = []
        for number in chosen:
            pair, operation = divmod(number, len(self.operations))
            left, right = divmod(pair, numbers)
            questions.append((first + left, self.operations[operation], first + right))
        return questions

    @property
    def description(self) -> str:
        return "made-up questions of arithmetic"


def _result(left: int, operation: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[operation]
