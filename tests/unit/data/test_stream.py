"""Streaming from a real server on loopback, in processes of their own (the library reads HF_* at import)."""

from __future__ import annotations

import io
import json
import os
import subprocess
from collections import deque
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import REPO, REVISION, Hub, closed_port, serving
from huggingface_hub import constants

from spider.config import Dataset
from spider.data.encode import encode_part
from spider.data.hub import DownloadError, Patience
from spider.tokens import BYTES
from tests.forkserver import python
from tests.unit.small_datasets import document_key, is_validation

FILES = ["sample/0.parquet", "sample/1.parquet"]
VALIDATION, SEQ_LEN = 0.2, 64
GROUP = "([0-9])$"
SCRIPT = """
import json, sys
from spider.config import Dataset
from spider.data.hub import Patience
common, variants, count = json.loads(sys.argv[1])
results = []
for options in variants:
    try:
        given = common | options
        source = {"kind": "stream", **{name: given.pop(name) for name in ("repo", "revision", "files")}}
        encoding = {name: given.pop(name) for name in Dataset.model_fields if name in given}
        number = given.pop("count", count)
        dataset = Dataset(source=source, **encoding)
        loader = dataset.source.batches(dataset, patience=Patience(2, 0.01), **given)
        batches = [next(loader) for _ in range(number)]
        loader.close()
    except ValueError as error:
        results.append(str(error))
    else:
        results.append([[b.rows_BT1.dtype.name, b.rows_BT1.tolist(), b.position] for b in batches])
print(json.dumps(results))
"""


def texts() -> list[str]:
    rng = np.random.default_rng(0)
    return [f"{i}: " + "é" * int(rng.integers(0, 90)) for i in range(130)]


def parquet(first: int, last: int) -> bytes:
    sink = io.BytesIO()
    ids = [f"id-{i}" for i in range(first, last)]
    table = pa.table({"score": [1.0] * (last - first), "text": texts()[first:last], "id": ids})
    pq.write_table(table, sink, row_group_size=17)
    return sink.getvalue()


def trained_on() -> list[str]:
    return [t for i, t in enumerate(texts()) if not is_validation(document_key(f"id-{i}", t), VALIDATION)]


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serving({FILES[0]: parquet(0, 80), FILES[1]: parquet(80, 130)}) as server:
        yield server


def run(endpoint: str, home: Path, count: int, *variants: dict) -> list:
    """Read ``count`` batches as (rows, position), or the error, for each variant of the options.

    All variants run in one process. A variant may have a ``count`` of its own.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    env |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    common = {
        "repo": REPO,
        "revision": REVISION,
        "files": FILES,
        "validation": VALIDATION,
        "seq_len": SEQ_LEN,
    }
    common |= {"rows": 3, "seed": 1}
    command = [python(), "-c", SCRIPT, json.dumps([common, variants or [{}], count])]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    for result in results:
        if isinstance(result, list):
            assert all(kind == "uint16" for kind, _, _ in result)
            result[:] = [(np.array(rows), position) for _, rows, position in result]
    return results


@pytest.fixture(scope="module")
def uninterrupted(hub, tmp_path_factory) -> list[tuple[np.ndarray, dict]]:
    """More than two epochs (an epoch is about 50 batches)."""
    return run(hub.endpoint, tmp_path_factory.mktemp("home"), 120)[0]


def test_an_epoch_has_each_training_document_once(uninterrupted):
    windows = np.concatenate([rows for rows, _ in uninterrupted])
    assert windows.shape == (360, SEQ_LEN + 1)
    assert (windows[1:, 0] == windows[:-1, -1]).all(), "windows overlap by one token"
    seen = documents_of(uninterrupted)
    epoch = len(trained_on())
    assert sorted(seen[:epoch]) == sorted(trained_on()) == sorted(seen[epoch : 2 * epoch])
    assert len(trained_on()) < 130
    assert uninterrupted[-1][1]["epoch"] == 2


#: After these batches a stream is resumed.
POSITIONS = [0, 7, 49, 50, 75]


@pytest.fixture(scope="module")
def later(hub, uninterrupted, tmp_path_factory) -> dict[str, list]:
    """Results of one other process by name, because starting a process takes longer than reading."""
    at = {place: uninterrupted[place][1] for place in (3, *POSITIONS)}
    variants = {
        "resumed": [{"position": at[place], "count": 40} for place in POSITIONS],
        "ranks": [{"rows": 1, "rank": r, "world": 3, "count": 10} for r in range(3)],
        "cut": [{"max_document_bytes": 20}],
        "grouped": [{"split_by": {"column": "id", "pattern": GROUP, "salt": 5}, "count": 60}],
        "refused": [
            {"position": at[3], "seed": 2},
            {"text_column": "content"},
            {"files": ["sample/2.parquet"]},
            {"validation": 0.9999},
            {"split_by": {"column": "url"}},
            {"split_by": {"column": "score"}},
            {"position": {name: value for name, value in at[3].items() if name != "format"}},
        ],
    }
    found = iter(
        run(hub.endpoint, tmp_path_factory.mktemp("home"), 3, *chain.from_iterable(variants.values()))
    )
    return {name: [next(found) for _ in given] for name, given in variants.items()}


def test_resumes_to_the_byte_in_a_new_process(later, uninterrupted):
    for at, again in zip(POSITIONS, later["resumed"], strict=True):
        assert len(again) == 40
        for (rows, where), (expected, there) in zip(again, uninterrupted[at + 1 :], strict=False):
            assert (rows == expected).all()
            assert (where["epoch"], where["offset"]) == (there["epoch"], there["offset"])


def test_ranks_share_the_global_order(later, uninterrupted):
    ranks = later["ranks"]
    for step, (expected, _) in enumerate(uninterrupted[:10]):
        assert (np.concatenate([ranks[r][step][0] for r in range(3)]) == expected).all()


def test_long_documents_are_truncated_at_a_character(later):
    (cut,) = later["cut"]
    tokens = np.concatenate([rows[:, 1:].ravel() for rows, _ in cut]).tolist()
    ends = [i for i, token in enumerate(tokens) if token == BYTES.eos]
    documents = [BYTES.decode(tokens[a + 1 : b]) for a, b in pairwise(ends)]
    assert max(len(d.encode()) for d in documents) in (19, 20)
    assert not any("\ufffd" in d for d in documents)


def test_a_held_out_group_is_never_trained_on(later):
    """The groups are the last digits of the ids; the split is that of `is_validation`, group by group."""
    (grouped,) = later["grouped"]
    windows = np.concatenate([rows for rows, _ in grouped])
    stream = [int(windows[0, 0]), *windows[:, 1:].ravel().tolist()]
    begins = [i for i, token in enumerate(stream) if token == BYTES.bos]
    seen = {BYTES.decode(stream[a + 1 : b - 1]).split(":")[0] for a, b in pairwise(begins)}
    held_out = {digit for digit in "0123456789" if is_validation(f"5/{digit}".encode(), VALIDATION)}
    assert 0 < len(held_out) < 10
    assert seen == {str(i) for i in range(130) if str(i)[-1] not in held_out}


def test_unusable_columns_are_errors(later):
    other_seed, other_column, no_file, no_document, no_group, no_text, _ = later["refused"]
    assert "the position to resume has seed = 1, this run has 2" in other_seed
    assert "no column 'content' (there are: score, text, id)" in other_column
    assert "no such file in the repository; did you mean sample/" in no_file
    assert "no text is left; lower validation" in no_document
    assert "no column 'url' (there are: score, text, id); set split_by.column to one of them" in no_group
    assert "column 'score' holds double, not strings; set split_by.column to another" in no_text


def test_a_broken_connection_resumes_and_a_missing_network_is_an_error(hub, tmp_path, uninterrupted):
    hub.cut = 1
    assert (run(hub.endpoint, tmp_path, 1)[0][0][0] == uninterrupted[0][0]).all()
    assert hub.cut == 0
    (message,) = run(f"http://127.0.0.1:{closed_port()}", tmp_path, 1)
    assert "cannot reach http://127.0.0.1" in message and len(message.splitlines()) == 1


def documents_of(batches: list[tuple[np.ndarray, dict]]) -> list[str]:
    """Return the documents of consecutive windows, without one that is cut at the end."""
    windows = np.concatenate([rows for rows, _ in batches])
    return whole(np.concatenate([windows[0, :1], windows[:, 1:].ravel()]))


def whole(tokens: np.ndarray) -> list[str]:
    *documents, _ = np.split(tokens, np.flatnonzero(tokens == BYTES.eos) + 1)
    assert all(document[0] == BYTES.bos for document in documents)
    return [BYTES.decode(document[1:-1]) for document in documents]


def written(table: pa.Table, **options: Any) -> bytes:
    pq.write_table(table, sink := io.BytesIO(), **options)
    return sink.getvalue()


def odd_files() -> dict[str, bytes]:
    """Return files whose schemas differ in ways that change neither texts nor ids for encoding."""
    texts = [f"{i}: text" for i in range(300)]
    numbers = pa.array([str(i) for i in range(60, 90)]).dictionary_encode()
    some = [None if i % 3 == 0 else "" if i % 3 == 1 else f"{i}" for i in range(90, 120)]
    tables = [
        pa.table({"text": texts[:30], "id": range(30)}),
        pa.table(
            {"id": [f"00{i}" for i in range(30, 60)], "text": pa.array(texts[30:60], pa.large_string())}
        ),
        pa.table({"id": numbers, "more": [[1.0]] * 30, "text": pa.array(texts[60:90], pa.string_view())}),
        pa.table({"text": texts[90:120], "id": some}),
        pa.table({"text": pa.array(texts[120:150]).dictionary_encode()}),
        pa.table({"text": pa.array([], pa.string()), "id": pa.array([], pa.int64())}),
        pa.table({"text": pa.nulls(3), "id": pa.nulls(3)}),
        pa.table({"text": [*texts[150:180], "", None], "id": pa.nulls(32)}),
        pa.table(
            {"text": texts[180:210], "id": pa.array(range(180, 210), pa.uint64()), "gone": pa.nulls(30)}
        ),
        pa.table({"text": texts[210:240], "id": [*range(210, 239), None], "key": uuids(30)}),
    ]
    return {f"odd/{i}.parquet": written(table, row_group_size=7) for i, table in enumerate(tables)}


def uuids(count: int) -> pa.Array:
    return pa.ExtensionArray.from_storage(
        pa.uuid(), pa.array([bytes([i] * 16) for i in range(count)], pa.binary(16))
    )


def test_the_held_out_documents_are_those_of_encode(tmp_path):
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
    with serving(files) as server:
        orders = run(server.endpoint, tmp_path, 24, *({"files": [*files], "seed": seed} for seed in range(6)))
    for batches in orders:
        assert isinstance(batches, list), batches
        seen = documents_of(batches)
        assert len(seen) > 2 * len(expected)
        assert sorted(seen[: len(expected)]) == sorted(seen[len(expected) : 2 * len(expected)]) == expected
    firsts = {documents_of(batches)[0] for batches in orders}
    assert len(firsts) > 2, "another file begins"


def test_an_unusable_file_is_named_before_the_first_window(tmp_path):
    """The first epoch may read it last."""
    good = written(pa.table({"text": ["good"] * 9, "id": ["1"] * 9, "url": ["a"] * 9}))
    bad = {
        "no_text": (
            written(pa.table({"id": [1], "url": ["a"]})),
            "no column 'text' (there are: id, url); set text_column",
        ),
        "numbers": (
            written(pa.table({"text": [1], "url": ["a"]})),
            "column 'text' holds int64, not strings; set text_column",
        ),
        "no_group": (
            written(pa.table({"text": ["a"]})),
            "no column 'url' (there are: text); set split_by.column",
        ),
        "cut": (good[:-9], "the footer does not decode"),
        "other": (b"text", "the footer does not decode"),
    }
    split_by = {"split_by": {"column": "url", "pattern": "."}}
    names = ["good/0.parquet", "good/1.parquet"]
    with serving(
        {**dict.fromkeys(names, good), **{name: content for name, (content, _) in bad.items()}}
    ) as server:
        variants = ({"files": [names[0], name, names[1]], **split_by} for name in bad)
        messages = run(server.endpoint, tmp_path, 0, *variants)
    for (name, (_, problem)), message in zip(bad.items(), messages, strict=True):
        assert (
            message.startswith(f"{name} of {REPO}@{REVISION}: {problem}") and len(message.splitlines()) == 1
        )


@pytest.mark.parametrize("number", [0, 1])
def test_a_damaged_row_group_is_an_error_with_its_file(tmp_path, number):
    files = {FILES[0]: parquet(0, 80), FILES[1]: parquet(80, 130)}
    at = pq.ParquetFile(io.BytesIO(files[FILES[number]])).metadata.row_group(1).column(1).data_page_offset
    whole = files[FILES[number]]
    files[FILES[number]] = whole[:at] + bytes([255] * 60) + whole[at + 60 :]
    with serving(files) as server:
        (message,) = run(server.endpoint, tmp_path, 60)
    where = f"{FILES[number]} of {REPO}@{REVISION}: not a complete parquet file (row group 1: "
    assert message.startswith(where) and "run again to continue; if it happens again, leave it out" in message


GROUPS, GROUP_BYTES = 20, 200_000


def wide() -> bytes:
    """Return 20 row groups of 200 kB of text, between two columns of as much that are not read."""
    rng = np.random.default_rng(0)

    def column() -> list[str]:
        return [rng.bytes(GROUP_BYTES // 20).hex()[: GROUP_BYTES // 10] for _ in range(10 * GROUPS)]

    table = pa.table({"before": column(), "text": column(), "id": range(10 * GROUPS), "after": column()})
    return written(table, row_group_size=10, compression="none", use_dictionary=False)


def test_only_the_row_groups_that_are_needed_are_requested(tmp_path):
    """Footers are 64 kB, read at the beginning and when a file is begun."""
    options = {"files": ["wide"], "seq_len": 4096, "rows": 1, "validation": 0.0}
    with serving({"wide": wide()}) as server:
        ((_, place),) = run(server.endpoint, tmp_path, 1, options)[0]
        place |= {"row": 10 * GROUPS - 5, "offset": 100}
        served = []
        for variant in ({"count": 0}, {"count": 1}, {"count": 1, "position": place}):
            before = server.served, server.content_requests
            run(server.endpoint, tmp_path, 1, options | variant)
            served.append((server.served - before[0], server.content_requests - before[1]))
    opened, begun, resumed = served
    assert opened == (1 << 16, 1)
    for size, requests in (begun, resumed):
        assert GROUP_BYTES < size - 2 * opened[0] < 1.1 * GROUP_BYTES
        assert requests == 4, "two footers, texts and ids"


def test_faults_of_the_hub_while_it_is_read_are_those_of_a_download(monkeypatch):
    with serving({FILES[0]: parquet(0, 80), FILES[1]: parquet(80, 130)}) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        template = f"{server.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        source = {"kind": "stream", "repo": REPO, "revision": REVISION, "files": FILES}
        dataset = Dataset(source=source)

        def message(change: dict[str, Any]) -> str:
            options = {"seq_len": SEQ_LEN, "rows": 1, "seed": 0, "patience": Patience(2, 0.01)}
            loader = dataset.source.batches(dataset, **options)
            next(loader)
            vars(server).update(change)
            with pytest.raises(DownloadError) as error:
                deque(loader, maxlen=0)
            loader.close()
            return str(error.value)

        files = dict(server.files)
        gone = message({"unavailable": -1})
        assert "the hub still responds 503; run again later to resume" in gone
        server.unavailable = 0
        assert "changed on the hub during the download" in message(
            {"files": dict.fromkeys(files, parquet(0, 90))}
        )
        server.files = files
        assert "no such file in the repository" in message({"files": {}})


def test_a_position_of_another_version_is_refused(later):
    """The streams of earlier versions had the state of a library as their position."""
    assert "the position to resume has format = None, this run has 2" in later["refused"][-1]
