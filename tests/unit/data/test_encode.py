"""Encoding of documents and odd rows; a failure leaves no incomplete file."""

from __future__ import annotations

import errno
import logging
import signal
import subprocess
import sys
import time
import uuid
from decimal import Decimal
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spider.common.files import read_json
from spider.data import documents, encode
from spider.data.documents import hash_keys, split_masks
from spider.data.encode import encode_part
from spider.data.listing import Section
from spider.data.sources.local import import_local
from spider.data.take import take_files
from spider.tokens import BYTES
from tests.unit.small_datasets import dataset, document_key, is_validation


def write(path: Path, texts: list[str | None], ids: list | None = None, **options) -> Path:
    columns: dict[str, object] = {"text": pa.array(texts, options.pop("type", pa.string()))}
    if ids is not None:
        columns["id"] = ids
    pq.write_table(pa.table(columns), path, **options)
    return path


def expected(texts: list[str], ids: list | None, share: float, split: str) -> tuple[list[int], list[int]]:
    """Return the tokens and BOS offsets of one split, document by document."""
    tokens: list[int] = []
    offsets: list[int] = []
    for i, text in enumerate(texts):
        if is_validation(document_key(ids[i] if ids else None, text), share) == (split == "validation"):
            offsets.append(2 * len(tokens))
            tokens += [BYTES.bos, *text.encode(), BYTES.eos]
    return tokens, offsets


def shard(folder: Path, split: str, part: str = "000") -> tuple[list[int], list[int]]:
    name = folder / split / part
    return (
        np.fromfile(name.with_suffix(".bin"), "<u2").tolist(),
        np.fromfile(name.with_suffix(".idx"), "<u8").tolist(),
    )


def check(folder: Path, texts: list[str], ids: list | None = None, share: float = 0.005) -> None:
    for split in ("train", "validation"):
        tokens, offsets = expected(texts, ids, share, split)
        assert shard(folder, split) == (tokens, offsets)
        record = read_json(folder / split / "000.json")
        assert record["tokens"] == len(tokens)
        assert record["documents"] == len(offsets)
        assert record["bytes"] == len(tokens) - 2 * len(offsets)
        assert record["file"] == f"{split}/000.bin"


WORDS = ["The cat sat.", "é", "日本語 text", "a" * 5000, "\0null byte\0", "🙂" * 40, "x"]
MANY = [WORDS[i % len(WORDS)] + str(i) for i in range(500)]
IDS = [f"<urn:{i}>" for i in range(500)]


@pytest.mark.parametrize("batch_bytes", [1, 100, documents.BATCH_BYTES])
def test_documents_become_bos_bytes_eos(tmp_path, monkeypatch, batch_bytes):
    monkeypatch.setattr(documents, "BATCH_BYTES", batch_bytes)
    large = ["é" * (1 << 19), "x" * (9 << 20)]  # larger than a block of the file, and than a writer's buffer
    texts, ids = [*MANY, *large, "the last"], [*IDS, "large", "larger", "last"]
    file = write(tmp_path / "a.parquet", texts, ids, row_group_size=77)
    encode_part(file, tmp_path / "out", "000", dataset(validation=0.2))
    check(tmp_path / "out", texts, ids, 0.2)
    assert shard(tmp_path / "out", "validation")[1], "the share must have held some documents out"


KINDS = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string()), pa.json_()]
KINDS += [pa.binary(), pa.large_binary(), pa.binary_view(), pa.dictionary(pa.int32(), pa.binary())]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_kind_of_text_column(tmp_path, kind):
    file = tmp_path / "a.parquet"
    texts = pa.array(MANY, kind) if "view" in str(kind) else pa.array(MANY).cast(kind)
    for stored in (False, True):
        pq.write_table(pa.table({"text": texts, "id": IDS}), file, row_group_size=100, store_schema=stored)
        encode_part(file, tmp_path / "out", "000", dataset(validation=0.1))
        check(tmp_path / "out", MANY, IDS, 0.1)
    names = {"a.parquet": Path(file), "b.parquet": Path(file)}
    take_files(names, Section(Decimal(0), Decimal(1), of_rows=True), tmp_path / "taken.parquet", dataset())
    assert sorted(pq.read_table(tmp_path / "taken.parquet")["text"].to_pylist()) == sorted(MANY * 2)


UUIDS = [uuid.UUID(int=i << 100 | i) for i in range(len(MANY))]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (pa.array(range(-3, 497)), [str(i) for i in range(-3, 497)]),
        (
            pa.array([None if i % 3 == 0 else "" if i % 3 == 1 else f"id{i}" for i in range(len(MANY))]),
            [f"id{i}" if i % 3 == 2 else None for i in range(len(MANY))],
        ),
        (pa.array(range(len(MANY)), pa.float64()), [str(i) for i in range(len(MANY))]),
        (pa.array([i + 0.5 for i in range(len(MANY))]), [f"{i}.5" for i in range(len(MANY))]),
        (pa.array([float("nan")] * len(MANY)), [None] * len(MANY)),
        (pa.array([one.bytes for one in UUIDS], pa.binary(16)), [one.hex for one in UUIDS]),
        (pa.array([one.bytes for one in UUIDS]), [one.hex for one in UUIDS]),
        (pa.array([one.bytes for one in UUIDS], pa.uuid()), [*map(str, UUIDS)]),
        (pa.array([one.encode() for one in IDS]), IDS),
        (pa.array(IDS).cast(pa.json_()), IDS),
        (
            pa.array([str(i) for i in range(len(MANY))]).cast(pa.decimal128(9, 0)),
            [str(i) for i in range(len(MANY))],
        ),
    ],
)
def test_ids_of_every_kind_decide_the_split_as_their_text(tmp_path, ids, expected):
    table = pa.table({"text": MANY, "id": ids})
    pq.write_table(table, tmp_path / "a.parquet")
    feather.write_feather(table, str(tmp_path / "a.feather"))
    for source in ("a.parquet", "a.feather"):
        import_local(tmp_path / source, tmp_path / "raw.parquet", dataset())
        encode_part(tmp_path / "raw.parquet", tmp_path / "out", "000", dataset(validation=0.2))
        check(tmp_path / "out", MANY, expected, 0.2)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(alphabet="ab é日🙂\0\n", max_size=30), max_size=40),
    group=st.integers(1, 12),
    share=st.sampled_from([0.0, 0.3, 0.9]),
    limit=st.sampled_from([None, 4, 5, 11]),
)
def test_any_documents_any_row_groups_any_limit(tmp_path, texts, group, share, limit):
    file = write(tmp_path / "a.parquet", texts, row_group_size=group)
    encode_part(file, tmp_path / "out", "000", dataset(validation=share, max_document_bytes=limit))
    kept = [text for text in texts if text]
    for split in ("train", "validation"):
        tokens: list[int] = []
        for text in kept:
            if is_validation(text.encode(), share) == (split == "validation"):
                head = text.encode()[:limit].decode(errors="ignore").encode()
                tokens += [BYTES.bos, *head, BYTES.eos]
        assert shard(tmp_path / "out", split)[0] == tokens


def test_null_and_empty_rows_are_skipped_and_truncated_ones_counted(tmp_path):
    file = write(tmp_path / "a.parquet", ["a", None, "", "日本", None, "c", ""], list("1234567"))
    records = encode_part(file, tmp_path / "out", "000", dataset(max_document_bytes=5))
    check(tmp_path / "out", ["a", "日", "c"], list("146"))
    rows = records["train"]["rows"]
    assert rows == {"read": 7, "null": 2, "empty": 2, "truncated": 1, "duplicates": 0}


def test_a_missing_id_column_hashes_the_text_with_a_warning(tmp_path, caplog):
    file = write(tmp_path / "a.parquet", MANY, row_group_size=50)
    with caplog.at_level(logging.WARNING):
        encode_part(file, tmp_path / "out", "000", dataset(validation=0.3))
    check(tmp_path / "out", MANY, None, 0.3)
    assert [r.message for r in caplog.records].count(
        f"{file}: no column 'id', the text itself decides the split"
    ) == 1


def test_repeated_ids_are_kept_and_counted_with_one_warning(tmp_path, caplog):
    texts, ids = MANY + MANY[:7], IDS + IDS[:7]
    with caplog.at_level(logging.WARNING):
        records = encode_part(write(tmp_path / "a.parquet", texts, ids), tmp_path / "out", "000", dataset())
    check(tmp_path / "out", texts, ids)
    assert records["train"]["rows"]["duplicates"] == 7
    assert len([r for r in caplog.records if "7 documents repeat" in r.message]) == 1


def test_malformed_utf8_is_copied_as_it_is(tmp_path):
    raw = pa.array([b"ok \xff\xfe", b"\x80\x80\x80\x80\x80\x80"]).view(pa.string())
    pq.write_table(pa.table({"text": raw, "id": ["a", "b"]}), tmp_path / "a.parquet")
    encode_part(tmp_path / "a.parquet", tmp_path / "out", "000", dataset(validation=0, max_document_bytes=5))
    bos, eos = BYTES.bos, BYTES.eos
    assert shard(tmp_path / "out", "train")[0] == [bos, *b"ok \xff\xfe", eos, bos, 0x80, 0x80, eos]


# ------------------------------------------------------------------------------------------ refused files


def left(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


# ------------------------------------------------------------------------------------- killed, full disk


def test_a_killed_process_leaves_no_final_name(tmp_path):
    file = write(tmp_path / "a.parquet", ["x" * 1000] * 50_000, compression="none", use_dictionary=False)
    code = f"""
from pathlib import Path
from spider.config import Dataset
from spider.data.encode import encode_part
encode_part(Path({str(file)!r}), Path({str(tmp_path / "out")!r}), "000", Dataset(source={{"kind": "pydocs"}}))
"""
    child = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while not any(p.stat().st_size > 1_000_000 for p in (tmp_path / "out").rglob("*.tmp")):
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert [n for n in left(tmp_path / "out") if not n.endswith(".tmp")] == []


def test_a_failed_encode_leaves_no_old_record(tmp_path, monkeypatch):
    """A process that dies between the shard and its record leaves no record."""
    encode_part(write(tmp_path / "a.parquet", MANY, IDS), tmp_path / "out", "000", dataset())
    monkeypatch.setattr(encode, "write_json", lambda *a: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="free space"):
        encode_part(write(tmp_path / "b.parquet", ["only"], ["1"]), tmp_path / "out", "000", dataset())
    assert not list((tmp_path / "out").rglob("*.json"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from Linux's /proc")
def test_memory_is_constant_and_torch_is_not_imported(tmp_path):
    """A row group of 200 MB, with a document of 20 MB, is 600 MB with its ids; the peak is below half."""
    texts = ["".join(map(str, range(5000)))] * 9000 + ["y" * 20_000_000]
    write(tmp_path / "a.parquet", texts, compression="zstd", use_dictionary=False)
    code = f"""
import sys
from pathlib import Path
from spider.config import Dataset
from spider.data.encode import encode_part
folder = Path({str(tmp_path)!r})
status = lambda: int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
before = status()
encode_part(folder / "a.parquet", folder / "out", "000", Dataset(source={{"kind": "pydocs"}}))
print(status() - before, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    grown, torch = done.stdout.split()
    assert int(grown) < 300_000 and torch == "False", "peak resident memory in kB"


SITES = [f"https://site{i % 23}.org/page/{i}" for i in range(500)]


def encode_by_site(
    folder: Path, urls: list[str | None], ngram: float = 0, **by: str
) -> dict[str, set[str | None]]:
    """Return the addresses of each split's documents, whose text is their number."""
    folder.mkdir()
    table = pa.table({"text": [str(i) for i in range(len(urls))], "id": IDS[: len(urls)], "url": urls})
    pq.write_table(table, folder / "a.parquet", row_group_size=77)
    settings = dataset(validation=0.2, ngram=ngram, split_by={"column": "url", **by})
    encode_part(folder / "a.parquet", folder, "000", settings)
    sides = {}
    for split in settings.splits:
        ids, offsets = shard(folder, split)
        texts = [BYTES.decode(ids[a // 2 : b // 2]) for a, b in pairwise([*offsets, 2 * len(ids)])]
        sides[split] = {urls[int(text)] for text in texts}
    return sides


def test_a_whole_site_is_in_the_ngram_split(tmp_path):
    sides = encode_by_site(tmp_path / "with", SITES, ngram=0.5, pattern="//([^/]+)")
    sites = {split: {url.split("/")[2] for url in urls} for split, urls in sides.items()}
    assert all(sites.values()) and sum(map(len, sites.values())) == 23, "each site is in one split"
    hosts = [f"site{i}.org" for i in range(23)]
    masks = split_masks(hash_keys(map(str.encode, hosts)), 0.2, 0.5)
    assert sites == {split: set(np.array(hosts)[mask]) for split, mask in masks.items()}
    without = encode_by_site(tmp_path / "without", SITES, pattern="//([^/]+)")
    assert without["validation"] == sides["validation"]
    assert without["train"] == sides["train"] | sides["ngram"]


def test_the_ngram_split_has_shards_only_with_a_share(tmp_path):
    file, out = write(tmp_path / "a.parquet", MANY, IDS), tmp_path / "out"
    with_ngrams = encode_part(file, out, "000", dataset(validation=0.2, ngram=0.5))
    assert len(left(out)) == 12
    documents = {}
    for split in ("train", "validation", "ngram"):
        ids, offsets = shard(out, split)
        documents[split] = [ids[a // 2 : b // 2] for a, b in pairwise([*offsets, 2 * len(ids)])]
        record = read_json(out / split / "000.json")
        assert record == with_ngrams[split] and record["ngram"] == 0.5
        assert record["documents"] == len(documents[split]) > 50
    every = [[BYTES.bos, *text.encode(), BYTES.eos] for text in MANY]
    assert sorted(chain.from_iterable(documents.values())) == sorted(every)

    without = encode_part(file, out, "000", dataset(validation=0.2))
    check(out, MANY, IDS, 0.2)
    assert len(left(out)) == 8 and "ngram" not in without["train"]


@pytest.mark.parametrize(
    ("pattern", "url", "group"),
    [
        ("[^/]+", "site{}/page", "site{}"),  # no group: the whole match
        ("//([^/]+)", "https://site{}.org/page", "site{}.org"),  # one group
        ("//([^/]+)/([^/]+)", "https://site{}.org/page", "site{}.org"),  # the first of two groups
        ("(www[.])?[a-z]+[0-9]+", "site{}.org", "site{}"),  # a group without a match: the whole match
        ("(w*)[a-z]+[0-9]+", "site{}.org", "site{}"),  # an empty group: the whole match
    ],
)
def test_the_group_of_a_document_is_the_match_of_the_pattern(tmp_path, pattern, url, group):
    """The group is the first group of the pattern, or the whole match, as `SplitBy.pattern` documents."""
    sides = encode_by_site(tmp_path / "o", [url.format(i % 23) for i in range(500)], pattern=pattern)
    held_out = {i for i in range(23) if is_validation(group.format(i).encode(), 0.2)}
    assert 0 < len(held_out) < 23
    assert sides["validation"] == {url.format(i) for i in held_out}
    assert sides["train"] == {url.format(i) for i in set(range(23)) - held_out}
