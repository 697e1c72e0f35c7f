"""Shards that others have published become ours: documents, ends, bytes; what is wrong with them is said."""

import hashlib

import numpy as np
import pytest

from spider.config import ConfigError, load_config
from spider.data.metadata import load_metadata
from spider.data.shards import Shards, inspect, verify
from spider.evaluation.text import validation_stream
from spider.files import read_json
from spider.sources import tokens as headered
from spider.tokens import BYTES
from spider.tokens.sentencepiece import read_model
from tests.unit.data.foreign import BOS, EOS, SIZE, UNK, bring, config_of, publish, shard, stream
from tests.unit.tokens.sentencepiece_file import in_pieces, write_model


def documents_of(view):
    ids = view.read(0, view.tokens)
    begins = np.flatnonzero(ids == BYTES.bos)
    assert (ids[np.append(begins[1:], len(ids)) - 1] == BYTES.eos).all() and ids[0] == BYTES.bos
    return [view.vocabulary.raw(document).decode() for document in np.split(ids, begins[1:])]


@pytest.fixture
def one(tmp_path):
    """One shard to train on, made of ids, and its import."""

    def make(*ids, held_out=("of the",), model=None):
        write_model(tmp_path / "m.model", **(model or {}))
        shard(tmp_path / "train_000.bin", ids)
        shard(tmp_path / "val_000.bin", stream(held_out))
        return bring(tmp_path)

    return make


@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 1 << 22])
def test_documents_come_back_and_files_say_what_is_held_out(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(headered, "CHUNK", chunk)
    documents = publish(tmp_path, count=12, size=200)
    metadata = bring(tmp_path)
    train, held_out = (documents_of(Shards(tmp_path / "shards", split)) for split in ("train", "validation"))
    assert held_out == documents[9:]
    torn = next(i for i, (a, b) in enumerate(zip(train, documents, strict=False)) if a != b)
    assert train[torn] + train[torn + 1] == documents[torn], "cut where the first file ends"
    assert train[:torn] + train[torn + 2 :] == documents[:torn] + documents[torn + 1 : 9]
    assert verify(tmp_path / "shards") == {
        "shards": 6, "documents": 13,
        "tokens": sum(split.tokens for split in metadata.splits.values()),
        "bytes": sum(len(text.encode()) for text in documents),
    }  # fmt: skip


def test_it_says_where_it_comes_from_and_in_what_it_is_written(tmp_path):
    publish(tmp_path)
    metadata = bring(tmp_path)
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


def test_a_model_that_normalises_leaves_a_mark_on_what_is_written_in_it(one):
    assert one(*stream(["of the"]), model={"normalizer": "nmt_nfkc"}).plain()["lossless"] is False


def test_signs_and_documents_without_text_are_left_out_and_counted(one, tmp_path):
    one(BOS, BOS, *in_pieces("of"), EOS, 0, BOS, EOS, BOS, *in_pieces("the"), BOS)
    assert documents_of(Shards(tmp_path / "shards", "train")) == ["of", "the"]
    assert read_json(tmp_path / "shards/train/000.json")["rows"] == {"read": 5, "empty": 3}


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (
            [BOS, 5, UNK],
            r"train_000.bin: token 2 is 3, '<unk>', which stands for no text; export the text with",
        ),
        (
            [BOS, 5, 60_000],
            r"train_000.bin: token 2 is 60000, and the model has [\d,]+ pieces; these are the",
        ),
        (
            [5, BOS, 5],
            r"train_000.bin: begins with id 5, '<0x01>', and no document's <s>; it goes on with a doc",
        ),
        ([60_000], r"token 0 is 60000, and the model has"),
        ([BOS, BOS], "train_000.bin: holds no documents"),
        ([], "train_000.bin: holds no documents"),
    ],
)
def test_ids_that_cannot_be_text_are_named_by_file_and_place(one, tmp_path, monkeypatch, ids, message):
    monkeypatch.setattr(headered, "CHUNK", 2)
    with pytest.raises(ValueError, match=message):
        one(*ids)
    assert not [path for path in (tmp_path / "shards").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda raw: raw[:-1],
            r"bytes instead of \d+ for the 3 tokens that its header promises; download it",
        ),
        (lambda raw: raw + b"xx", "its header promises"),
        (lambda raw: raw[:100], "not a headered shard, which begins with the int32 20240520 and 1"),
        (lambda raw: b"\0" * 4 + raw[4:], "not a headered shard"),
        (lambda raw: raw[:4] + b"\2" + raw[5:], "not a headered shard"),
    ],
)
def test_a_damaged_shard_is_named(one, tmp_path, damage, message):
    one(*stream(["abc"])[:3])
    path = tmp_path / "train_000.bin"
    path.write_bytes(damage(path.read_bytes()))
    dataset = load_config(config_of(tmp_path)).datasets["web"]
    with pytest.raises(ValueError, match=rf"train_000\.bin: .*{message}"):
        dataset.source.import_part(path, tmp_path / "shards", "000", dataset)
    path.unlink()
    with pytest.raises(ValueError, match=r"train_000\.bin: No such file"):
        dataset.source.import_part(path, tmp_path / "shards", "000", dataset)


def test_another_number_of_ids_than_the_models_says_which_to_set(tmp_path):
    publish(tmp_path)
    with pytest.raises(ValueError, match=rf"has {SIZE} ids with those of bytes, and 999 is given; set it to"):
        bring(tmp_path, load_config(config_of(tmp_path, vocab_size=999)))


def test_a_part_that_was_made_of_another_file_or_for_another_split_is_noticed(tmp_path):
    publish(tmp_path)
    bring(tmp_path)
    record = tmp_path / "shards/train/001.json"
    first = [f"{tmp_path}/train_000.bin"]
    for held_out in ("val_000.bin", "train_001.bin"):
        changed = config_of(tmp_path, train=first, validation=[f"{tmp_path}/{held_out}"])
        source = load_config(changed).datasets["web"].source
        with pytest.raises(ValueError, match=r"part 001 was made of .*train_001.bin \(train\), not"):
            source.imported("001", record)
    with pytest.raises(ValueError, match=r"part 007 is missing; encode it first"):
        source.imported("007", record.with_name("007.json"))


@pytest.mark.parametrize("limit", [1, 5, 100, 10**9])
def test_what_stands_there_is_scored_as_it_stands_and_the_same_text_in_bytes(tmp_path, limit):
    documents = publish(tmp_path)
    bring(tmp_path)
    view = Shards(tmp_path / "shards", "validation")
    ids_N, _ = validation_stream(tmp_path / "shards", limit, view.vocabulary)
    assert ids_N.tolist() == view.read(0, len(ids_N)).tolist(), "the ids that stand there"
    text = "".join(documents[30:]).encode()
    size = int(view.vocabulary.bytes_of[ids_N].sum())
    assert min(limit, len(text)) <= size < limit + 16, "cut behind an id"
    bytes_N, _ = validation_stream(tmp_path / "shards", limit, BYTES)
    assert BYTES.raw(bytes_N) == view.vocabulary.raw(ids_N) == text[:size]


def test_what_is_trained_on_is_not_held_out(tmp_path):
    publish(tmp_path)
    source = load_config(config_of(tmp_path, train=[f"{tmp_path}/*.bin"])).datasets["web"].source
    with pytest.raises(ConfigError, match=r"val_000\.bin is both in source.train and in source.validation"):
        source.items()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"tokenizer": "t"},
            "datasets.web.tokenizer: shards that others have written are in the ids of their",
        ),
        (
            {"validation": 0.1},
            "datasets.web.validation: shards that others have written have no rows of text",
        ),
        ({"format": "chat"}, "datasets.web.format: shards that others"),
        ({"ngram": 0.1}, "datasets.web.ngram: shards that others"),
    ],
)
def test_settings_of_text_are_no_settings_of_shards(tmp_path, change, message):
    plain = config_of(tmp_path)
    plain["datasets"]["web"] |= change
    with pytest.raises(ConfigError) as error:
        load_config(plain)
    assert message in str(error.value)


def test_a_model_has_as_many_ids_as_the_shards_and_what_does_not_go_together_is_said(tmp_path):
    plain = config_of(tmp_path)
    assert load_config(plain).stage("r", "a").model.vocab_size == SIZE
    plain["tokenizers"] = {"t": {"data": "web"}}
    with pytest.raises(ConfigError, match=r"tokenizers\.t\.data: 'web' holds token ids and no text"):
        load_config(plain)
    plain = config_of(tmp_path, vocab_size=70_000)
    with pytest.raises(ConfigError, match=r"datasets.web.source.vocab_size: must be at least 272, .* 65,536"):
        load_config(plain)
    plain = config_of(tmp_path)
    plain["runs"]["r"]["model"] = "tiny"
    with pytest.raises(ConfigError, match=r"runs.r.data: web is written in .*m\.model, and the spider reads"):
        load_config(plain)
