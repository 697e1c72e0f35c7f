"""A source of text in one file: each paragraph of a text file is a document."""

from pathlib import Path

from spider.common.files import replacing
from spider.config import Dataset, Source


class Paragraphs(Source):
    """The paragraphs of a text file that have enough words."""

    file: str
    """Path of the text file."""
    min_words: int = 1
    """Paragraphs with fewer words are left out."""

    def items(self) -> list[str]:
        return [self.file]

    def own_files(self, item: str) -> list[str]:
        return [item]

    def fetch(self, part: str, output: Path, dataset: Dataset) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        paragraphs = Path(self.file).read_text("utf-8").split("\n\n")
        texts = [text for text in paragraphs if len(text.split()) >= self.min_words]
        with replacing(output) as beside:
            pq.write_table(pa.table({dataset.text_column: texts}), beside)

    @property
    def description(self) -> str:
        return f"paragraphs of {self.file}"
