"""Streaming from a real server on loopback."""

from __future__ import annotations

import io
import json
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import REPO, REVISION, Hub, closed_port, reached, serving
from huggingface_hub import constants

from spider.config import Dataset
from spider.data.encode import encode_part
from spider.data.hub import Patience
from spider.tokens import BYTES
from tests.unit.small_datasets import document_key, is_validation

FILES = ["sample/0.parquet", "sample/1.parquet"]
VALIDATION, SEQ_LEN = 0.2, 64
GROUP = "([0-9])$"


def texts() -> list[str]:
    rng = np.random.default_rng(0)
    return [f"{i}: " + "é" * int(rng.integers(0, 90)) for i in range(130)]


def written(table: pa.Table, **options: Any) -> bytes:
    pq.write_table(table, sink := io.BytesIO(), **options)
    return sink.getvalue()


def parquet(first: int, last: int) -> bytes:
    ids = [f"id-{i}" for i in range(first, last)]
    table = pa.table({"score": [1.0] * (last - first), "text": texts()[first:last], "id": ids})
    return written(table, row_group_size=17)


def trained_on() -> list[str]:
    return [t for i, t in enumerate(texts()) if not is_validation(document_key(f"id-{i}", t), VALIDATION)]


def loader_of(files: list[str], encoding: dict[str, Any], **options: Any) -> Any:
    source = {"kind": "stream", "repo": REPO, "revision": REVISION, "files": files}
    dataset = Dataset(source=source, **encoding)
    order = {"seq_len": SEQ_LEN, "rows": 3, "seed": 1, "patience": Patience(2, 0.01)}
    return dataset.source.batches(dataset, **order | options)


def read(count: int, files: list[str] = FILES, validation: float = VALIDATION, **given: Any) -> list:
    """Return so many batches, each as (rows, position)."""
    encoding = {name: given.pop(name) for name in Dataset.model_fields if name in given}
    loader = loader_of(files, encoding | {"validation": validation}, **given)
    try:
        batches = [next(loader) for _ in range(count)]
    finally:
        loader.close()
    assert all(batch.rows_BT1.dtype == np.uint16 for batch in batches)
    return [(batch.rows_BT1, json.loads(json.dumps(batch.position))) for batch in batches]


def error_of(files: list[str] = FILES, count: int = 1, **given: Any) -> str:
    """Return the error of a stream that cannot be read: one line."""
    with pytest.raises(ValueError) as error:
        read(count, files, **given)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


@pytest.fixture(scope="module")
def patched():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def server():
    with serving({FILES[0]: parquet(0, 80), FILES[1]: parquet(80, 130)}) as hub:
        yield hub


@pytest.fixture
def hub(server, monkeypatch) -> Hub:
    reached(server, monkeypatch)
    return server


@pytest.fixture(scope="module")
def uninterrupted(server, patched) -> list[tuple[np.ndarray, dict]]:
    """More than two epochs (an epoch is about 50 batches)."""
    reached(server, patched)
    return read(120)


def documents_of(batches: list[tuple[np.ndarray, dict]]) -> list[str]:
    """Return the documents of consecutive windows, without one that is cut at the end."""
    windows = np.concatenate([rows for rows, _ in batches])
    return whole(np.concatenate([windows[0, :1], windows[:, 1:].ravel()]))


def whole(tokens: np.ndarray) -> list[str]:
    *documents, _ = np.split(tokens, np.flatnonzero(tokens == BYTES.eos) + 1)
    assert all(document[0] == BYTES.bos for document in documents)
    return [BYTES.decode(document[1:-1]) for document in documents]


def test_an_epoch_has_each_training_document_once(uninterrupted):
    windows = np.concatenate([rows for rows, _ in uninterrupted])
    assert windows.shape == (360, SEQ_LEN + 1)
    assert (windows[1:, 0] == windows[:-1, -1]).all(), "windows overlap by one token"
    seen = documents_of(uninterrupted)
    epoch = len(trained_on())
    assert sorted(seen[:epoch]) == sorted(trained_on()) == sorted(seen[epoch : 2 * epoch])
    assert epoch < 130 and uninterrupted[-1][1]["epoch"] == 2


@pytest.mark.parametrize("at", [0, 49, 50, 75])
def test_resumes_to_the_byte(hub, uninterrupted, at):
    again = read(30, position=uninterrupted[at][1])
    for (rows, where), (expected, there) in zip(again, uninterrupted[at + 1 :], strict=False):
        assert (rows == expected).all()
        assert (where["epoch"], where["offset"]) == (there["epoch"], there["offset"])


def test_ranks_share_the_global_order(hub, uninterrupted):
    ranks = [read(10, rows=1, rank=rank, world=3) for rank in range(3)]
    for step, (expected, _) in enumerate(uninterrupted[:10]):
        assert (np.concatenate([ranks[r][step][0] for r in range(3)]) == expected).all()


def test_a_held_out_group_is_never_trained_on(hub):
    """The groups are the last digits of the ids; the split is that of `is_validation`, group by group."""
    batches = read(60, split_by={"column": "id", "pattern": GROUP, "salt": 5})
    seen = {document.split(":")[0] for document in documents_of(batches)}
    held_out = {digit for digit in "0123456789" if is_validation(f"5/{digit}".encode(), VALIDATION)}
    assert 0 < len(held_out) < 10
    assert seen == {str(i) for i in range(130) if str(i)[-1] not in held_out}


def test_a_position_of_another_order_or_version_and_a_stream_without_text_are_errors(hub, uninterrupted):
    position = uninterrupted[3][1]
    assert "the position to resume has seed = 1, this run has 2" in error_of(position=position, seed=2)
    del position["format"]  # as in versions whose position was the state of a library
    assert "the position to resume has format = None, this run has 2" in error_of(position=position)
    assert "no such file in the repository; did you mean sample/" in error_of(["sample/2.parquet"])
    assert "no text is left; lower validation" in error_of(validation=0.9999)


def test_a_broken_connection_resumes_and_a_missing_network_is_an_error(hub, monkeypatch, uninterrupted):
    hub.cut = 1
    assert (read(1)[0][0] == uninterrupted[0][0]).all() and hub.cut == 0
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    assert "cannot reach http://127.0.0.1" in error_of()


def odd_files() -> dict[str, bytes]:
    """Return files whose schemas differ in ways that change neither texts nor ids for encoding."""
    texts = [f"{i}: text" for i in range(300)]
    numbers = pa.array([str(i) for i in range(60, 90)]).dictionary_encode()
    some = [None if i % 3 == 0 else "" if i % 3 == 1 else f"{i}" for i in range(90, 120)]
    uuids = pa.array([bytes([i] * 16) for i in range(30)], pa.binary(16))
    tables = [
        {"text": texts[:30], "id": range(30)},
        {"id": [f"00{i}" for i in range(30, 60)], "text": pa.array(texts[30:60], pa.large_string())},
        {"id": numbers, "more": [[1.0]] * 30, "text": pa.array(texts[60:90], pa.string_view())},
        {"text": texts[90:120], "id": some},
        {"text": pa.array(texts[120:150]).dictionary_encode()},
        {"text": pa.array([], pa.string()), "id": pa.array([], pa.int64())},
        {"text": pa.nulls(3), "id": pa.nulls(3)},
        {"text": [*texts[150:180], "", None], "id": pa.nulls(32)},
        {"text": texts[180:210], "id": pa.array(range(180, 210), pa.uint64()), "gone": pa.nulls(30)},
        {
            "text": texts[210:240],
            "id": [*range(210, 239), None],
            "key": pa.ExtensionArray.from_storage(pa.uuid(), uuids),
        },
    ]
    return {f"odd/{i}.parquet": written(pa.table(table), row_group_size=19) for i, table in enumerate(tables)}


def test_the_held_out_documents_are_those_of_encode(tmp_path, monkeypatch):
    """They are in every order of the files, and in the second epoch too."""
    files = odd_files()
    dataset = Dataset(source={"kind": "mock"}, validation=VALIDATION)
    trained_on, held_out = [], []
    for part, content in enumerate(files.values()):
        (tmp_path / f"{part}.parquet").write_bytes(content)
        encode_part(tmp_path / f"{part}.parquet", tmp_path, f"{part}", dataset)
        trained_on.append(whole(np.fromfile(tmp_path / f"train/{part}.bin", "<u2")))
        held_out += whole(np.fromfile(tmp_path / f"validation/{part}.bin", "<u2"))
    assert len(held_out) > 20
    expected = sorted(chain.from_iterable(trained_on))
    firsts = set()
    with serving(files) as server:
        reached(server, monkeypatch)
        for seed in range(3):
            seen = documents_of(read(24, [*files], seed=seed))
            assert len(seen) > 2 * len(expected)
            assert (
                sorted(seen[: len(expected)]) == sorted(seen[len(expected) : 2 * len(expected)]) == expected
            )
            firsts.add(seen[0])
    assert len(firsts) > 1, "another file begins"


def test_an_unusable_file_is_named_before_the_first_window(monkeypatch):
    """The first epoch may read it last."""
    good = written(pa.table({"text": ["good"] * 9, "id": ["1"] * 9, "url": ["a"] * 9}))
    bad = {
        "no_text": (written(pa.table({"id": [1], "url": ["a"]})), "no column 'text' (there are: id, url)"),
        "no_group": (written(pa.table({"text": ["a"]})), "no column 'url' (there are: text); set split_by"),
        "cut": (good[:-9], "the footer does not decode"),
    }
    with serving({"good": good} | {name: content for name, (content, _) in bad.items()}) as server:
        reached(server, monkeypatch)
        for name, (_, problem) in bad.items():
            message = error_of(["good", name], 0, split_by={"column": "url", "pattern": "."})
            assert message.startswith(f"{name} of {REPO}@{REVISION}: {problem}")


GROUPS, GROUP_BYTES = 20, 200_000


def test_only_the_row_groups_that_are_needed_are_requested(monkeypatch):
    """Footers are 64 kB, read at the beginning and when a file is begun. Two of the columns are not read."""
    rng = np.random.default_rng(0)

    def column() -> list[str]:
        return [rng.bytes(GROUP_BYTES // 20).hex()[: GROUP_BYTES // 10] for _ in range(10 * GROUPS)]

    table = pa.table({"before": column(), "text": column(), "id": range(10 * GROUPS), "after": column()})
    wide = written(table, row_group_size=10, compression="none", use_dictionary=False)
    options = {"files": ["wide"], "seq_len": 4096, "rows": 1, "validation": 0.0}
    with serving({"wide": wide}) as server:
        reached(server, monkeypatch)
        ((_, place),) = read(1, **options)
        place |= {"row": 10 * GROUPS - 5, "offset": 100}
        served = []
        for count, position in ((0, None), (1, None), (1, place)):
            before = server.served, server.content_requests
            read(count, position=position, **options)
            served.append((server.served - before[0], server.content_requests - before[1]))
    opened, begun, resumed = served
    assert opened == (1 << 16, 1)
    for size, requests in (begun, resumed):
        assert GROUP_BYTES < size - 2 * opened[0] < 1.1 * GROUP_BYTES
        assert requests == 4, "two footers, texts and ids"
