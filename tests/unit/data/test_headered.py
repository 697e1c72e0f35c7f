"""Published shards are imported: documents, ends, bytes; damage is an error."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from spider.common.files import read_json
from spider.config import ConfigError, load_config
from spider.data.shards import Shards, inspect, load_metadata, verify
from spider.data.sources import tokens as headered
from spider.evaluation.text import validation_stream
from spider.tokens import BYTES
from spider.tokens.sentencepiece import read_model
from tests.unit.data.published import BOS, EOS, SIZE, config_of, import_shards, publish, shard, stream
from tests.unit.tokens.sentencepiece_file import in_pieces, write_model


def documents_of(view):
    ids = view.read(0, view.tokens)
    begins = np.flatnonzero(ids == BYTES.bos)
    assert (ids[np.append(begins[1:], len(ids)) - 1] == BYTES.eos).all() and ids[0] == BYTES.bos
    return [view.vocabulary.raw(document).decode() for document in np.split(ids, begins[1:])]


@pytest.fixture
def one(tmp_path):
    """Return a function that writes one training shard of the given tokens and imports it."""

    def make(*ids, held_out=("of the",), model=None):
        write_model(tmp_path / "m.model", **(model or {}))
        shard(tmp_path / "train_000.bin", ids)
        shard(tmp_path / "val_000.bin", stream(held_out))
        return import_shards(tmp_path)

    return make


@pytest.mark.parametrize("chunk", [1, 7, 1 << 22])
def test_documents_are_restored_and_files_decide_the_split(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(headered, "CHUNK", chunk)
    documents = publish(tmp_path, count=12, size=200)
    metadata = import_shards(tmp_path)
    train, held_out = (documents_of(Shards(tmp_path / "shards", split)) for split in ("train", "validation"))
    assert held_out == documents[9:]
    divided = next(i for i, (a, b) in enumerate(zip(train, documents, strict=False)) if a != b)
    assert train[divided] + train[divided + 1] == documents[divided], "divided where the first file ends"
    assert train[:divided] + train[divided + 2 :] == documents[:divided] + documents[divided + 1 : 9]
    assert verify(tmp_path / "shards") == {
        "shards": 6, "documents": 13,
        "tokens": sum(split.tokens for split in metadata.splits.values()),
        "bytes": sum(len(text.encode()) for text in documents),
    }  # fmt: skip


def test_the_description_names_origin_and_tokenizer(tmp_path):
    publish(tmp_path)
    metadata = import_shards(tmp_path)
    plain, tokens = read_json(tmp_path / "shards/metadata.json"), read_model(tmp_path / "m.model").tokens
    assert (plain["tokenizer"], plain["tokenizer_kind"]) == (tokens.digest, "sentencepiece")
    assert plain["vocab_size"] == SIZE == tokens.size and "lossless" not in plain and metadata.lossless
    assert not plain.keys() & {"text_column", "id_column", "validation"}
    files = plain["source"]["files"]
    assert [file["name"].rpartition("/")[2] for file in files] == [
        "train_000.bin", "train_001.bin", "val_000.bin",
    ]  # fmt: skip
    assert files[0]["sha256"] == hashlib.sha256((tmp_path / "train_000.bin").read_bytes()).hexdigest()
    assert load_metadata(tmp_path / "shards").vocabulary.digest == tokens.digest
    assert inspect(tmp_path / "shards")["splits"]["validation"]["documents"] == 10


def test_control_pieces_and_empty_documents_are_left_out_and_counted(one, tmp_path):
    one(BOS, BOS, *in_pieces("of"), EOS, 0, BOS, EOS, BOS, *in_pieces("the"), BOS)
    assert documents_of(Shards(tmp_path / "shards", "train")) == ["of", "the"]
    assert read_json(tmp_path / "shards/train/000.json")["rows"] == {"read": 5, "empty": 3}


def test_a_shard_without_the_begin_of_a_document_is_named_before_the_first_job(tmp_path):
    publish(tmp_path)
    dataset = load_config(config_of(tmp_path)).datasets["web"]
    items = dataset.source.items()
    assert dataset.source.probe(items, dataset) == sum(Path(item).stat().st_size for item in items)
    shard(tmp_path / "train_001.bin", [5, 6])
    with pytest.raises(ValueError, match=r"train_001.bin: none of its first 2 tokens is <s>"):
        dataset.source.probe(items, dataset)
    shard(tmp_path / "train_001.bin", [5, BOS, 6])  # It continues a document of the shard before.
    dataset.source.probe(items, dataset)
    shard(tmp_path / "val_000.bin", [5, BOS, 6])
    with pytest.raises(ValueError, match=r"val_000.bin: begins with token 5"):
        dataset.source.probe(items, dataset)


@pytest.mark.parametrize("limit", [1, 100, 10**9])
def test_published_tokens_are_scored_unchanged_and_as_the_same_text_in_bytes(tmp_path, limit):
    documents = publish(tmp_path)
    import_shards(tmp_path)
    view = Shards(tmp_path / "shards", "validation")
    ids_N, _ = validation_stream(tmp_path / "shards", limit, view.vocabulary)
    assert ids_N.tolist() == view.read(0, len(ids_N)).tolist(), "the published tokens"
    text = "".join(documents[30:]).encode()
    size = int(view.vocabulary.bytes_of[ids_N].sum())
    assert min(limit, len(text)) <= size < limit + 16, "cut after a token"
    bytes_N, _ = validation_stream(tmp_path / "shards", limit, BYTES)
    assert BYTES.raw(bytes_N) == view.vocabulary.raw(ids_N) == text[:size]


def test_a_model_gets_the_vocabulary_of_the_shards_and_mismatches_are_errors(tmp_path):
    plain = config_of(tmp_path)
    assert load_config(plain).stage("r", "a").model.vocab_size == SIZE
    plain["tokenizers"] = {"t": {"data": "web"}}
    with pytest.raises(ConfigError, match=r"tokenizers\.t\.data: 'web' has token ids instead of text"):
        load_config(plain)
    plain = config_of(tmp_path, vocab_size=70_000)
    with pytest.raises(ConfigError, match=r"datasets.web.source.vocab_size: must be at least 272 .* 65,536"):
        load_config(plain)
    plain = config_of(tmp_path)
    plain["runs"]["r"]["model"] = "tiny"
    with pytest.raises(ConfigError, match=r"runs.r.data: web is encoded by .*m\.model, but the family"):
        load_config(plain)
