"""Learning a tokenizer, and datasets that are written in one."""

import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import regex

from spider.common.files import read_json
from spider.config import TokenizerConfig
from spider.data.cleaning.evidence import removed_rows, table, write_removed
from spider.data.encode import encode_part
from spider.data.shards import Shards, build_metadata, inspect, load_metadata, verify
from spider.data.tokenizer import learn
from spider.evaluation.text import validation_stream
from spider.tokens import BYTES
from spider.tokens.stored import PATTERN, read_tokens
from tests.forkserver import python
from tests.unit.small_datasets import dataset
from tests.unit.tokens.texts import texts


def parquet(path, documents):
    pq.write_table(pa.table({"text": documents, "id": [str(i) for i in range(len(documents))]}), path)
    return path


@pytest.fixture(scope="module")
def part(tmp_path_factory):
    return parquet(tmp_path_factory.mktemp("raw") / "000.parquet", texts(400))


def config(size, **settings):
    return TokenizerConfig(data="text", vocab_size=size, **settings)


HALF = dataset(validation=0.5)


@pytest.fixture(scope="module")
def learned(part, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    learn([part], path, "t", config(300), HALF)
    return path


def test_what_cleaning_removes_is_not_learned(tmp_path):
    """The vocabulary is that of the documents that are kept."""
    own = texts(300)
    raw = parquet(tmp_path / "raw.parquet", [*own, *(f"{i} " + "qzqzqz " * 50 for i in range(60))])
    kept = parquet(tmp_path / "kept.parquet", own)
    rows = np.arange(len(own), len(own) + 60, dtype=np.uint32)
    evidence = tmp_path / "removed.parquet"
    write_removed(evidence, "raw", table({"part": "raw", "row": rows, "reason": "exact"}, 60))

    def learn_from(file, name, *removed):
        path = tmp_path / f"{name}.json"
        return learn([file], path, "t", config(310), dataset(validation=0.1), map(removed_rows, removed))

    expected, found = learn_from(kept, "a"), learn_from(raw, "b", evidence)
    whole = learn_from(raw, "c")
    assert found.merges == expected.merges != whole.merges
    assert read_json(tmp_path / "b.json")["learned_from"] == read_json(tmp_path / "a.json")["learned_from"]
    assert learn_from(raw, "d", None).digest == whole.digest
    evidence.unlink()
    with pytest.raises(ValueError, match=r"removed.parquet: is missing"):
        learn_from(raw, "e", evidence)


def encoded(part, folder, learned, settings=HALF):
    encode_part(part, folder, "000", settings, read_tokens(learned) if learned else BYTES)
    return build_metadata(folder, "text", settings, source={}, parts=["000"], tokenizer=learned)


def test_the_merges_do_not_depend_on_order_and_threads(part, learned, tmp_path):
    shuffled = parquet(tmp_path / "p.parquet", texts(400)[::-1])
    everything, other = dataset(validation=0.0), tmp_path / "b.json"
    first = learn([part], tmp_path / "a.json", "t", config(310), everything)
    assert learn([shuffled], other, "t", config(310), everything).digest == first.digest
    code = (
        "from pathlib import Path\nfrom tests.unit.data.test_tokenizer import config, dataset, learn\n"
        f"learn([Path({str(part)!r})], Path({str(other)!r}), 't', config(310), dataset(validation=0.0))"
    )
    alone = os.environ | {"RAYON_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([python(), "-c", code], check=True, env=alone)
    assert (tmp_path / "a.json").read_bytes() == other.read_bytes()


def test_the_most_frequent_pair_is_merged_and_of_equal_ones_the_earliest(tmp_path):
    """Tokens of more than 255 bytes, which shards cannot count, are left out, and others take their place."""
    documents = texts(30) + ["-" * 600, "abab cdcd"] * 40
    words = Counter(word.encode() for text in documents for word in regex.findall(PATTERN, text))
    left = [([word[i : i + 1] for i in range(len(word))], count) for word, count in words.items()]
    ids = {bytes([i]): i for i in range(256)}
    while True:
        pairs = Counter()
        for parts, count in left:
            for pair in pairwise(parts):
                pairs[pair] += count
        if not pairs:
            break
        _, pair = min((-count, tuple(ids[part] for part in pair)) for pair, count in pairs.items())
        names = list(ids)
        first, second = (names[i] for i in pair)
        ids[first + second] = len(ids)
        for parts, _ in left:
            for i in range(len(parts)):
                if parts[i : i + 2] == [first, second]:
                    parts[i : i + 2] = [first + second]
    expected = [text for text in ids if 1 < len(text) <= 255]
    assert len(expected) < len(ids) - 256
    part = parquet(tmp_path / "p.parquet", documents)
    size = BYTES.size + len(expected)
    learned = learn([part], tmp_path / "t.json", "t", config(size), dataset(validation=0.0))
    assert [learned.raw([i]) for i in range(BYTES.size, size)] == expected
    with pytest.raises(ValueError, match=rf"have only {len(expected)}; set it to {size},"):
        learn([part], tmp_path / "t.json", "t", config(size + 1), dataset(validation=0.0))


def test_at_most_the_configured_bytes_are_read(part, tmp_path):
    learn([part, part], tmp_path / "t.json", "t", config(280, max_bytes=2000, document_bytes=64), HALF)
    taken = read_json(tmp_path / "t.json")["learned_from"]
    assert 1900 < taken["bytes"] <= 2000 and taken["documents"] > 2000 / 64


def test_every_document_is_encoded_and_restored(part, learned, tmp_path):
    metadata, tokens = encoded(part, tmp_path, learned), read_tokens(learned)
    plain = encoded(part, tmp_path / "bytes", None)
    assert metadata.vocab_size == 300 and metadata.tokenizer == tokens.digest
    for split in ("train", "validation"):
        view, bytes_ = Shards(tmp_path, split), Shards(tmp_path / "bytes", split)
        ids = view.read(0, view.tokens)
        assert tokens.raw(ids) == BYTES.raw(bytes_.read(0, bytes_.tokens))
        assert metadata.splits[split].bytes == plain.splits[split].bytes
        assert metadata.splits[split].documents == plain.splits[split].documents
        assert len(ids) < 0.6 * bytes_.tokens
    assert verify(tmp_path)["documents"] == 400
    assert load_metadata(tmp_path).vocabulary.digest == tokens.digest
    shown = inspect(tmp_path)["splits"]["train"]
    assert shown["bytes_per_token"] > 2 and shown["beginning"].startswith(tokens.decode(ids[:0]))
    assert shown["document_bytes"] == inspect(tmp_path / "bytes")["splits"]["train"]["document_bytes"]


@pytest.mark.parametrize("limit", [1, 37, 500, 501, 502, 503, 10**9])
def test_the_same_bytes_are_scored_in_any_vocabulary(part, learned, tmp_path, limit):
    encoded(part, tmp_path / "bpe", learned)
    encoded(part, tmp_path / "bytes", None)
    tokens = read_tokens(learned)
    want_N, _ = validation_stream(tmp_path / "bytes", limit, BYTES)
    for folder in ("bpe", "bytes"):
        for vocabulary in (tokens, BYTES):
            got_N, _ = validation_stream(tmp_path / folder, limit, vocabulary)
            assert vocabulary.raw(got_N) == BYTES.raw(want_N)
            specials = np.concatenate([got_N[vocabulary.bytes_of[got_N] == 0]])
            assert specials.tolist() == want_N[BYTES.bytes_of[want_N] == 0].tolist()
            again = [vocabulary.encode(text)[1:-1].tolist() for text in _documents(want_N)]
            assert [i for i in got_N.tolist() if vocabulary.bytes_of[i]] == [i for ids in again for i in ids]


def _documents(stream_N):
    return [BYTES.raw(run) for run in np.split(stream_N, np.flatnonzero(stream_N == BYTES.bos)[1:])]
