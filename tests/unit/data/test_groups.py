"""Tests of `spider.data.shards`: groups are recorded at encode time, and no group dominates a choice."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spider.common.files import read_json
from spider.data.encode import encode_part
from spider.data.shards import (
    Shards,
    balanced,
    build_metadata,
    held_out_groups,
    load_metadata,
    scored_groups,
    verify,
)
from spider.evaluation.text import validation_stream
from spider.tokens import BYTES
from tests.unit.small_datasets import dataset, is_validation

#: 24 small packages and a package with half of the text, whose documents come first.
DOCUMENTS = [("huge", 400)] * 60 + [(f"small{i % 24}", 100 + i) for i in range(200)]
BY_PACKAGE = dataset(validation=0.99, split_by={"column": "package"})


def encoded(folder, documents, settings=BY_PACKAGE, parts=1):
    """Encode documents of these packages and sizes, dealt to parts in order, and return the shards folder."""
    names = [f"{part:03d}" for part in range(parts)]
    folder.mkdir()
    for name, own in zip(names, np.array_split(np.arange(len(documents)), parts), strict=True):
        packages, sizes = zip(*(documents[i] for i in own), strict=True)
        texts = [f"{i:04d}".ljust(size, "x") for i, size in zip(own, sizes, strict=True)]
        columns = {"text": texts, "id": [f"d{i}" for i in own], "package": packages}
        pq.write_table(pa.table(columns), folder / f"{name}.parquet", row_group_size=37)
        encode_part(folder / f"{name}.parquet", folder, name, settings)
    build_metadata(folder, "packages", settings, source={}, parts=names)
    return folder


def documents_of(ids):
    """Return the number and the size of each document of a stream."""
    texts = [BYTES.raw(own) for own in np.split(ids, np.flatnonzero(ids == BYTES.bos)[1:])]
    return [int(text[:4]) for text in texts], [len(text) for text in texts]


def held_out(documents, share=0.99):
    return [i for i, (package, _) in enumerate(documents) if is_validation(package.encode(), share)]


def test_the_groups_of_held_out_documents_are_recorded_in_order(tmp_path):
    folder = encoded(tmp_path / "a", DOCUMENTS, parts=3)
    kept = held_out(DOCUMENTS)
    assert len(kept) > 200
    assert held_out_groups(folder) == [DOCUMENTS[i][0] for i in kept]
    shards = Shards(folder, "validation")
    assert documents_of(shards.read(0, shards.tokens))[0] == kept
    assert read_json(folder / "validation/000.json")["groups"][0] == ["huge", 60]
    assert "groups" not in read_json(folder / "train/000.json")


def test_groups_are_not_in_the_digest_of_a_dataset(tmp_path):
    """Shards of an earlier Spider, or published ones, have the same digest and no groups."""
    folder = encoded(tmp_path / "a", DOCUMENTS)
    before = load_metadata(folder).digest
    (folder / "validation/000.json").unlink()
    assert load_metadata(folder).digest == before and verify(folder)["shards"] == 2
    assert held_out_groups(folder) == scored_groups(folder, 1000, None) == []
    with pytest.raises(
        ValueError, match=r"do not record the groups .* evaluation.largest_group needs; delete"
    ):
        balanced(folder, 10_000, 0.1)
    by_itself = encoded(tmp_path / "b", DOCUMENTS, dataset(validation=0.5))
    assert held_out_groups(by_itself) == []


def test_no_group_has_more_than_its_share_of_the_scored_text(tmp_path):
    folder = encoded(tmp_path / "a", DOCUMENTS, parts=3)
    first, _ = validation_stream(folder, 10_000)
    assert documents_of(first)[0] == list(range(25))  # without the key, all of it is of the huge package
    for max_bytes, share in ((10_000, 0.1), (10_000, 0.06), (10**9, 0.1), (20_000, 0.5)):
        ids, digest = validation_stream(folder, max_bytes, largest_group=share)
        numbers, sizes = documents_of(ids)
        assert digest == load_metadata(folder).digest
        assert numbers == sorted(numbers) and set(numbers) <= set(held_out(DOCUMENTS))
        assert sizes == [DOCUMENTS[i][1] for i in numbers]  # whole documents
        names = scored_groups(folder, max_bytes, share)
        assert names == [DOCUMENTS[i][0] for i in numbers]
        of_group = {
            name: sum(size for own, size in zip(names, sizes, strict=True) if own == name) for name in names
        }
        assert max(of_group.values()) <= share * sum(sizes) and sum(sizes) <= max_bytes
        assert sum(sizes) > 0.9 * min(max_bytes, 20_000)
        for name in of_group:  # the first documents of each group
            every = [i for i in held_out(DOCUMENTS) if DOCUMENTS[i][0] == name]
            chosen = [i for i in numbers if DOCUMENTS[i][0] == name]
            assert chosen == every[: len(chosen)]
