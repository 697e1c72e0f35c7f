"""Filters: which documents each one keeps, what is counted, and errors that name file, column and remedy."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spider.data.documents import learned_texts, read_documents, row_counts
from spider.data.encode import encode_part
from spider.data.sources.local import import_local
from tests.unit.small_datasets import dataset

ROWS = {
    "text": ["one", "two two", "", "tres", None, "four lorem ipsum", "five"],
    "language": ["en", "en", "en", "es", "en", None, "de"],
    "score": [1.5, 3.0, 9.0, 4.0, 9.0, 5.0, None],
    "year": [1, 2, 3, 4, 5, 6, 7],
}


def write(path, columns=None, **types):
    columns = ROWS if columns is None else columns
    arrays = {name: pa.array(values, types.get(name)) for name, values in columns.items()}
    pq.write_table(pa.table(arrays), path)
    return path


def kept(path, *filters):
    """Return the rows that filters keep, and what was left out."""
    counts = row_counts()
    spec = dataset(cleaning={"filters": list(filters)})
    rows = [documents.rows for documents in read_documents(path, spec, counts)]
    assert counts["read"] == len(ROWS["text"]) and counts["null"] == counts["empty"] == 1
    return np.concatenate(rows).tolist(), counts["left_out"]


@pytest.mark.parametrize(
    ("written", "rows"),
    [
        ("bytes >= 4", [1, 3, 5, 6]),
        ("bytes < 4", [0]),
        ("language == en", [0, 1]),
        ("language != en", [3, 6]),
        ("language in en, de", [0, 1, 6]),
        ("language not in [en, 'de']", [3]),
        ("score >= 3", [1, 3, 5]),
        ("score == 3", [1]),
        ("year == 4", [3]),
        ("year > 2.5", [3, 5, 6]),
        ("text ~ ^t", [1, 3]),
        ("text !~ 'lorem ipsum'", [0, 1, 3, 6]),
    ],
)
def test_a_filter_keeps_documents_that_have_the_value_and_meet_it(tmp_path, written, rows):
    for types in ({}, {"language": pa.dictionary(pa.int8(), pa.string()), "score": pa.float32()}):
        found, left_out = kept(write(tmp_path / "a.parquet", **types), written)
        assert found == rows and left_out == {written: 5 - len(rows)}


def test_a_document_is_counted_by_the_first_filter_that_it_fails(tmp_path):
    found, left_out = kept(write(tmp_path / "a.parquet"), "score >= 3", "language == en", "year > 0")
    assert found == [1] and left_out == {"score >= 3": 2, "language == en": 2, "year > 0": 0}


def test_an_import_keeps_the_columns_of_filters(tmp_path):
    rows = [{"text": f"text {i}", "score": i, "other": "x"} for i in range(4)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    spec = dataset(cleaning={"filters": ["score >= 2", "bytes > 3"]}, validation=0)
    import_local(tmp_path / "a.jsonl", tmp_path / "a.parquet", spec)
    assert pq.read_schema(tmp_path / "a.parquet").names == ["text", "id", "score"]
    assert list(learned_texts(tmp_path / "a.parquet", spec)) == [b"text 2", b"text 3"]

    wrong = dataset(cleaning={"filters": ["quality >= 2"]})
    with pytest.raises(ValueError, match=r"no line has 'quality' \(keys: 'other', 'score', 'text'\)"):
        import_local(tmp_path / "a.jsonl", tmp_path / "b.parquet", wrong)
    (tmp_path / "a.txt").write_text("a text")
    with pytest.raises(
        ValueError, match=r"a text has no column 'quality'; set cleaning.filters\[0\] to 'id'"
    ):
        import_local(tmp_path / "a.txt", tmp_path / "b.parquet", wrong)


def test_rows_lead_from_a_shard_to_the_raw_file(tmp_path):
    texts = [f"text {i}" for i in range(300)]
    path = write(tmp_path / "a.parquet", {"text": texts})
    spec = dataset(cleaning={"filters": ["bytes > 6"]}, validation=0.3)
    removed = {"exact": np.array([20, 21], np.uint32)}
    records = encode_part(path, tmp_path, "000", spec, removed=removed)
    assert records["train"]["rows"]["left_out"] == {"bytes > 6": 10, "exact": 2}
    rows = {}
    for split in ("train", "validation"):
        rows[split] = np.fromfile(tmp_path / split / "000.rows", "<u4").tolist()
        ids = np.fromfile(tmp_path / split / "000.bin", "<u2")
        written = bytes(ids[ids < 256].astype(np.uint8)).decode()
        assert written == "".join(texts[row] for row in rows[split])
        assert len(rows[split]) == records[split]["documents"]
    assert sorted(rows["train"] + rows["validation"]) == [*range(10, 20), *range(22, 300)]

    with pytest.raises(ValueError, match="has 1 of the 2 documents that were removed from it"):
        encode_part(path, tmp_path, "000", spec, removed={"exact": np.array([20, 300], np.uint32)})
