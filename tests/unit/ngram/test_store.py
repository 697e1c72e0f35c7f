"""An n-gram index on disk has the same bytes however it was built, and damage is an error with its path."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from spider.data.ngram.layout import BEGIN, symbols_of
from spider.data.ngram.store import MARK, build, open_index, verify
from spider.data.shards import Shards, load_metadata
from spider.tokens import BYTES
from tests.unit.ngram.small_index import CONFIG, PARTS, SPLITS, build_indexes


@pytest.fixture
def copied(indexes, tmp_path):
    """A copy of an index that a test may damage."""
    return shutil.copytree(indexes["split"], tmp_path / "ngram")


def flip(path, at: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


# ----------------------------------------------------------------------------------------------- content


def test_an_index_holds_the_text_of_its_splits_and_no_other(indexes, shards):
    held = {}
    for name, splits in SPLITS.items():
        opened = open_index(indexes[name])
        views = [Shards(shards, split) for split in splits]
        text = np.concatenate([symbols_of(BYTES)[view.read(0, view.tokens)] for view in views])
        held[name] = opened.tables.text.tobytes()
        assert held[name] == text.tobytes()
        described = opened.description
        assert (described.splits, described.bytes) == (splits, len(text))
        assert list(described.contexts) == ["1", "2", "3", "5", "9", "words0", "words2"]
        assert described.counted == CONFIG.counted
        assert described.data_digest == load_metadata(shards).digest
        for kind, size in described.contexts.items():
            rows = np.load(indexes[name] / f"{kind}.rows.npy")
            assert size.contexts == len(rows) > 0 and (size.left_out > 0) == (kind in ("9", "words2"))
        verify(indexes[name])
    train = symbols_of(BYTES)[Shards(shards, "train").read(0, Shards(shards, "train").tokens)].tobytes()
    longest = max(train.split(bytes([BEGIN])), key=len)
    assert len(longest) > 60 and longest in held["full"] and longest not in held["split"]
    whole = load_metadata(shards).splits
    assert len(held["full"]) == whole["ngram"].tokens + whole["train"].tokens
    assert whole["validation"].tokens > 0


def test_an_index_built_again_with_other_threads_has_the_same_bytes(indexes, shards, tmp_path):
    again = build_indexes(shards, tmp_path, threads=3)
    for name in SPLITS:
        before = {path.name: path.read_bytes() for path in indexes[name].iterdir()}
        assert before == {path.name: path.read_bytes() for path in again[name].iterdir()}


def test_an_unfinished_index_cannot_be_opened(indexes, shards, tmp_path):
    """The description is written last, and an old one is removed before anything else is written."""
    again = build_indexes(shards, tmp_path)["split"]
    (tmp_path / "counts" / PARTS[0] / "ngram/text.npy").unlink()
    with pytest.raises(FileNotFoundError):
        build([tmp_path / "counts" / part for part in PARTS], load_metadata(shards), ["ngram"], CONFIG, again)
    with pytest.raises(ValueError, match=rf"{again}: no n-gram index lies there \(no index\.json\); delete "):
        open_index(again)


def test_a_merge_that_failed_continues_after_its_finished_tables(indexes, shards, tmp_path):
    """A finished table of other data is built again."""
    metadata = load_metadata(shards)
    parts = [tmp_path / "counts" / part for part in PARTS]
    again = build_indexes(shards, tmp_path)["split"]
    (again / MARK).unlink()
    other = metadata.model_copy(update={"digest": "another"})
    run = parts[0] / "ngram/words2.000.counts.npy"  # of the last table
    whole = run.read_bytes()
    run.write_bytes(whole[:-4])
    message = rf"{run}: ends after [\d,]+ of [\d,]+ elements; delete {parts[0]} and run again"
    for described in (other, metadata):
        before = (again / "1.rows.npy").stat().st_mtime_ns
        with pytest.raises(ValueError, match=message):
            build(parts, described, ["ngram"], CONFIG, again)
        assert (again / "1.rows.npy").stat().st_mtime_ns > before
    run.write_bytes(whole)
    before = {path: path.stat().st_mtime_ns for path in again.glob("*.rows.npy")}
    build(parts, metadata, ["ngram"], CONFIG, again)
    rebuilt = {path.name for path, time in before.items() if path.stat().st_mtime_ns > time}
    assert rebuilt == {"words2.rows.npy"}
    expected = {path.name: path.read_bytes() for path in indexes["split"].iterdir()}
    assert {path.name: path.read_bytes() for path in again.iterdir()} == expected


# ------------------------------------------------------------------------------------------------ damage


def test_a_flipped_byte_in_any_file_is_found(copied):
    names = sorted(f.name for f in copied.iterdir() if f.name != MARK)
    assert len(names) == 2 * len(CONFIG.context_kinds) + 2
    for name in names:
        flip(copied / name)
        open_index(copied)
        with pytest.raises(
            ValueError, match=rf"^{copied / name}: SHA-256 differs from the manifest\n"
        ) as error:
            verify(copied)
        assert f"delete {copied} and run `snakemake" in str(error.value)
        flip(copied / name)
    verify(copied)
