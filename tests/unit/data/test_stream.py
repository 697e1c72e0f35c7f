"""Streaming from a real server on loopback."""

from __future__ import annotations

import io
import json
from itertools import chain, pairwise, takewhile
from pathlib import Path
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
from spider.tokens import BYTES, Tokens
from spider.tokens.stored import BpeTokens
from tests.unit.small_datasets import document_key, is_validation

FILES = ["sample/0.parquet", "sample/1.parquet"]
VALIDATION, SEQ_LEN = 0.2, 64
GROUP = "([0-9])$"
ROWS, LANES = 12, 6
SMALL_WINDOW = 400
"""Bytes of a window of the shuffle, so that a row group has several."""


def texts() -> list[str]:
    rng = np.random.default_rng(0)
    return [f"{i}: " + "é" * int(rng.integers(0, 90)) for i in range(130)]


def written(table: pa.Table, **options: Any) -> bytes:
    pq.write_table(table, sink := io.BytesIO(), **options)
    return sink.getvalue()


def parquet(first: int, last: int) -> bytes:
    ids = [f"id-{i}" for i in range(first, last)]
    table = pa.table({"score": [*range(first, last)], "text": texts()[first:last], "id": ids})
    return written(table, row_group_size=5, compression="none")


def trained_on() -> list[str]:
    return [t for i, t in enumerate(texts()) if not is_validation(document_key(f"id-{i}", t), VALIDATION)]


def loader_of(files: list[str], encoding: dict[str, Any], **options: Any) -> Any:
    source = {"kind": "stream", "repo": REPO, "revision": REVISION, "files": files}
    dataset = Dataset(source=source | {"take": encoding.pop("take", None)}, **encoding)
    order = {"seq_len": SEQ_LEN, "rows": ROWS, "seed": 1, "patience": Patience(2, 0.01)}
    return dataset.source.batches(dataset, **order | options)


def read(count: int, files: list[str] = FILES, validation: float = VALIDATION, **given: Any) -> list:
    """Return so many batches, each as (rows, position)."""
    names = {*Dataset.model_fields, "take"} & given.keys()
    encoding = {name: given.pop(name) for name in names}
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


@pytest.fixture(autouse=True, scope="module")
def small_windows(patched):
    patched.setattr("spider.data.documents.BATCH_BYTES", SMALL_WINDOW)


@pytest.fixture(scope="module")
def uninterrupted(server, patched) -> list[tuple[np.ndarray, dict]]:
    """More than two epochs."""
    reached(server, patched)
    return read(40)


def documents_of(batches: list[tuple[np.ndarray, dict]], tokens: Tokens = BYTES) -> list[list[str]]:
    """Return the documents of each lane in consecutive batches, without one that is cut at the end."""
    lanes = batches[0][1]["lanes"]
    found = []
    for lane in np.split(np.stack([rows for rows, _ in batches]), lanes, axis=1):
        windows = lane.reshape(-1, lane.shape[-1])
        assert (windows[1:, 0] == windows[:-1, -1]).all(), "windows overlap by one token"
        found.append(whole(np.concatenate([windows[0, :1], windows[:, 1:].ravel()]), tokens))
    return found


def whole(ids: np.ndarray, tokens: Tokens = BYTES) -> list[str]:
    *documents, _ = np.split(ids, np.flatnonzero(ids == tokens.eos) + 1)
    assert all(document[0] == tokens.bos for document in documents)
    return [tokens.decode(document[1:-1]) for document in documents]


def first_epoch(files: list[str], tokens: Tokens = BYTES, **given: Any) -> list[list[str]]:
    """Return the documents of each lane in its first epoch, as they are dealt to the lanes."""
    loader = loader_of(files, given | {"validation": VALIDATION}, tokens=tokens)
    lanes = (loader._read(lane, 0, 0, 0, 0) for lane in loader._lanes)
    epochs = (takewhile(lambda one: one[0][0] == 0, lane) for lane in lanes)
    found = [[tokens.decode(ids[1:-1]) for _, ids in documents] for documents in epochs]
    loader.close()
    return found


def test_an_epoch_has_each_training_document_once_in_a_new_order(uninterrupted):
    assert np.concatenate([rows for rows, _ in uninterrupted]).shape == (40 * ROWS, SEQ_LEN + 1)
    place = np.reshape(uninterrupted[-1][1]["places"], (LANES, 5))
    assert uninterrupted[-1][1]["lanes"] == LANES and (place[:, 0] >= 2).all(), "all are in the third epoch"
    epoch = first_epoch(FILES)
    lanes = documents_of(uninterrupted)
    assert [lane[: len(dealt)] for lane, dealt in zip(lanes, epoch, strict=True)] == epoch
    assert {*chain.from_iterable(lanes)} == {*trained_on()}
    assert lanes[0][: len(epoch[0])] != lanes[0][len(epoch[0]) : 2 * len(epoch[0])]
    one = list(chain.from_iterable(epoch))
    assert sorted(one) == sorted(trained_on()) and len(one) < 130
    numbers = [int(document.split(":")[0]) for document in one]
    assert sum(a // 5 == b // 5 and a > b for a, b in pairwise(numbers)) > 10, "in a row group too"
    assert sum(a // 5 > b // 5 for a, b in pairwise(numbers)) > 5, "of the row groups too"


def test_epochs_of_one_lane_follow_each_other(hub):
    (lane,) = documents_of(read(400, rows=1))
    count = len(trained_on())
    assert len(lane) > 2 * count and lane[:count] != lane[count : 2 * count]
    assert sorted(lane[:count]) == sorted(trained_on()) == sorted(lane[count : 2 * count])


@pytest.mark.parametrize("at", [0, 7, 19, 31])
def test_resumes_to_the_byte(hub, uninterrupted, at):
    again = read(8, position=uninterrupted[at][1])
    for (rows, where), (expected, there) in zip(again, uninterrupted[at + 1 :], strict=False):
        assert (rows == expected).all()
        assert where["places"] == there["places"]


def of_all(ranks: list[list[tuple[np.ndarray, dict]]]) -> list[tuple[np.ndarray, dict]]:
    """Return the batches of all ranks as one, with the sum of their places."""
    together = []
    for step in zip(*ranks, strict=True):
        places = np.sum([position["places"] for _, position in step], axis=0).tolist()
        together.append((np.concatenate([rows for rows, _ in step]), step[0][1] | {"places": places}))
    return together


@pytest.mark.parametrize("world", [2, 3, 4, 12])
def test_any_number_of_ranks_sees_the_same_order_and_resumes_on_another_number(hub, uninterrupted, world):
    """4 and 12 ranks share lanes, 2 and 3 do not."""
    share = {"rows": ROWS // world, "world": world}
    ranks = of_all([read(6, rank=rank, **share) for rank in range(world)])
    for (rows, where), (expected, there) in zip(ranks, uninterrupted, strict=False):
        assert (rows == expected).all() and where == there
    ((rows, _),) = read(1, position=ranks[-1][1])
    assert (rows == uninterrupted[6][0]).all()
    share["position"] = uninterrupted[20][1]
    resumed = of_all([read(1, rank=rank, **share) for rank in range(world)])
    assert (resumed[0][0] == uninterrupted[21][0]).all()


def encoded_with(folder: Path, contents: list[bytes], tokens: Tokens = BYTES, **settings: Any) -> list[str]:
    """Return the training documents of an encoded dataset."""
    found = []
    for part, content in enumerate(contents):
        (folder / f"{part}.parquet").write_bytes(content)
        encode_part(folder / f"{part}.parquet", folder, f"{part}", Dataset(**settings), tokens)
        found += whole(np.fromfile(folder / f"train/{part}.bin", "<u2"), tokens)
    return found


SETTINGS = [
    {"take": "9 kB", "cleaning": {"filters": ["bytes >= 40", "score < 110"]}},
    {"take": "50%", "split_by": {"column": "id", "pattern": GROUP, "salt": 5}, "max_document_bytes": 100},
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("learned", [False, True])
def test_an_epoch_is_the_text_of_the_encoded_dataset_of_the_same_settings(hub, tmp_path, settings, learned):
    tokens = BpeTokens([(195, 169), (272, 272), (273, 273)]) if learned else BYTES
    source = {"kind": "hub", "repo": REPO, "revision": REVISION, "files": FILES, "take": settings["take"]}
    same = {name: value for name, value in settings.items() if name != "take"} | {"validation": VALIDATION}
    stored = Dataset(source=source, **same)
    stored.source.fetch("000", tmp_path / "taken.parquet", stored)
    expected = encoded_with(
        tmp_path, [(tmp_path / "taken.parquet").read_bytes()], tokens, source=source, **same
    )
    batches = read(10 if learned else 30, rows=2, tokens=tokens, **settings)
    assert 20 < len(expected) < 80
    epoch = first_epoch(FILES, tokens, **settings)
    assert sorted(chain.from_iterable(epoch)) == sorted(expected) and len(epoch) > 1
    assert {*chain.from_iterable(documents_of(batches, tokens))} <= {*expected}
    if learned:
        ids = np.concatenate([rows.ravel() for rows, _ in batches])
        assert {272, 273, 274} <= {*ids.tolist()}
        other = BpeTokens([(195, 169)])
        assert "has tokenizer = " in error_of(position=batches[3][1], rows=2, tokens=other, **settings)
    resumed = read(2, rows=2, tokens=tokens, position=batches[5][1], **settings)
    assert all((rows == batches[6 + i][0]).all() for i, (rows, _) in enumerate(resumed))


def test_a_held_out_group_is_never_trained_on(hub):
    """The groups are the last digits of the ids; the split is that of `is_validation`, group by group."""
    batches = read(20, split_by={"column": "id", "pattern": GROUP, "salt": 5})
    seen = {document.split(":")[0] for document in chain.from_iterable(documents_of(batches))}
    held_out = {digit for digit in "0123456789" if is_validation(f"5/{digit}".encode(), VALIDATION)}
    assert 0 < len(held_out) < 10
    assert seen == {str(i) for i in range(130) if str(i)[-1] not in held_out}


def test_a_position_of_another_order_or_version_and_a_stream_without_text_are_errors(hub, uninterrupted):
    position = dict(uninterrupted[3][1])
    assert "the position to resume has seed = 1, this run has 2" in error_of(position=position, seed=2)
    del position["format"]  # as in versions whose position was the state of a library
    assert "the position to resume has format = None, this run has 3" in error_of(position=position)
    message = error_of(position=uninterrupted[3][1], rows=ROWS + 1)
    assert "has 6 lanes, which 13 windows of a step do not share evenly; start again" in message
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
    settings = {"source": {"kind": "mock"}, "validation": VALIDATION}
    expected = encoded_with(tmp_path, [*files.values()], **settings)
    firsts = set()
    with serving(files) as server:
        reached(server, monkeypatch)
        for seed in range(3):
            (seen,) = documents_of(read(80, [*files], seed=seed, rows=1))
            count = len(expected)
            assert len(seen) > 2 * count
            assert sorted(seen[:count]) == sorted(seen[count : 2 * count]) == sorted(expected)
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


def test_a_rank_requests_each_footer_once_and_only_its_own_row_groups(monkeypatch):
    """Footers are 64 kB. Two of the columns are not read. A window is a whole row group."""
    monkeypatch.setattr("spider.data.documents.BATCH_BYTES", 1 << 22)
    monkeypatch.setattr("spider.data.loader.DEPTH", 0)  # nothing is read ahead
    rng = np.random.default_rng(0)

    def column() -> list[str]:
        return [rng.bytes(GROUP_BYTES // 20).hex()[: GROUP_BYTES // 10] for _ in range(10 * GROUPS)]

    table = pa.table({"before": column(), "text": column(), "id": range(10 * GROUPS), "after": column()})
    wide = written(table, row_group_size=10, compression="none", use_dictionary=False)
    options = {"files": ["wide"], "seq_len": 4096, "validation": 0.0, "world": 2}
    footer = 1 << 16
    with serving({"wide": wide}) as server:
        reached(server, monkeypatch)

        def cost(count: int, **given: Any) -> tuple[float, int, list]:
            before = server.served, server.content_requests
            batches = read(count, **options | given)
            size, requests = server.served - before[0], server.content_requests - before[1]
            return (size - footer) / GROUP_BYTES, requests - 1, batches

        assert cost(0, rows=2, rank=0)[:2] == (0, 0)
        begun = [cost(1, rows=2, rank=rank) for rank in range(2)]
        for groups, requests, _ in begun:
            assert 2 < groups < 2.1 and requests == 4, "texts and ids of a row group for each of two lanes"
        position = of_all([batches for *_, batches in begun])[0][1]
        assert 4 < cost(1, rows=4, world=1, position=position)[0] < 4.2
        windows = 10 * GROUPS * GROUP_BYTES // 10 // 4096  # of an epoch
        whole_epoch = [cost(windows // 4, rows=2, rank=rank)[0] for rank in range(2)]
        assert whole_epoch == pytest.approx([GROUPS / 2] * 2, rel=0.01), "each row group is requested once"
