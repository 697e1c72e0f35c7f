"""Advice about tokenizers and published shards."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from spider.config import load_config
from spider.data.shards import build_metadata
from spider.tokens.sentencepiece import read_model
from spider.tokens.stored import read_tokens, tokens_in
from tests.unit.data.published import BOS, SIZE, config_of, publish, shard, stream
from tests.unit.small_datasets import dataset
from tests.unit.tokens.sentencepiece_file import BYTE, PIECES, write_model

from .followed import refused


def imported(folder: Path, **source: object) -> None:
    """Import all parts of the shards in a folder."""
    dataset = load_config(config_of(folder, **source)).datasets["web"]
    for part, item in zip(dataset.source.parts(), dataset.source.items(), strict=True):
        dataset.source.import_part(Path(item), folder / "shards", part, dataset)


def test_the_model_and_the_shards_are_given_as_the_messages_say(tmp_path):
    publish(tmp_path)
    with refused("data/sources/tokens.py", "but the configuration says {}; set it to {}"):
        imported(tmp_path, vocab_size=SIZE + 1)
    imported(tmp_path, vocab_size=SIZE)
    with refused("tokens/sentencepiece.py", "{}: {}; give the SentencePiece model of the shards"):
        imported(tmp_path, model=str(tmp_path / "none.model"))
    write_model(tmp_path / "m.model", prefix=True)
    with refused("tokens/sentencepiece.py", "export it with add_dummy_prefix=False"):
        imported(tmp_path)
    write_model(tmp_path / "m.model", prefix=False)
    imported(tmp_path)
    first = tmp_path / "train_000.bin"
    aside = first.rename(tmp_path / "aside")
    with refused("data/sources/tokens.py", "list that file first, or give the model of these shards"):
        imported(tmp_path)
    aside.rename(first)
    whole = first.read_bytes()
    shard(first, [token for token in stream(["of the"]) if token != BOS])
    with refused("data/sources/tokens.py", "export the shards with it, or give the model of these shards"):
        imported(tmp_path)
    shard(first, [*stream(["of the"]), 60_000])
    with refused("data/sources/tokens.py", "but the model has {} pieces; give the model of these shards"):
        imported(tmp_path)
    first.write_bytes(whole[:-2])
    with refused("data/shards.py", "for the {} tokens of its header; download it again"):
        imported(tmp_path)
    first.unlink()
    with refused("data/shards.py", "{}: {}; name an existing shard"):
        imported(tmp_path, train=[str(first)])
    first.write_bytes(whole)
    imported(tmp_path, train=[str(first)])


def test_imported_parts_are_those_of_the_configuration(tmp_path):
    publish(tmp_path)
    source = load_config(config_of(tmp_path)).datasets["web"].source
    record = tmp_path / "shards/train/000.json"
    web = load_config(config_of(tmp_path)).datasets["web"]
    with refused("config/data.py", "a source of kind {} has nothing to download; encode its parts"):
        source.fetch("000", tmp_path / "raw.parquet", web)
    with refused("data/sources/tokens.py", "{}: part {} is missing; encode it first"):
        source.imported("000", record)
    imported(tmp_path)
    source.imported("000", record)
    renamed = [str(shutil.copyfile(tmp_path / "train_000.bin", tmp_path / "first.bin"))]
    other = load_config(config_of(tmp_path, train=renamed)).datasets["web"].source
    with refused("data/sources/tokens.py", "was made from {}, not {}; encode it again"):
        other.imported("000", record)
    imported(tmp_path, train=renamed)
    other.imported("000", record)


def test_text_without_a_piece_is_left_out_or_exported_with_byte_pieces(tmp_path):
    letters = [piece for piece in PIECES if piece[1] != BYTE]
    write_model(tmp_path / "m.model", letters)
    of, unknown = ([name for name, _ in letters].index(name) for name in ("of", "<unk>"))
    for name in ("train_000", "val_000"):
        shard(tmp_path / f"{name}.bin", [BOS, of, unknown])
    with refused("data/sources/tokens.py", "the text with a model that has byte pieces (byte_fallback=True)"):
        imported(tmp_path)
    tokens = read_model(tmp_path / "m.model").tokens
    with refused("tokens/sentencepiece.py", "leave it out of the text"):
        tokens.encode("of ß")
    tokens.encode("of ")
    write_model(tmp_path / "m.model")
    for name in ("train_000", "val_000"):
        shard(tmp_path / f"{name}.bin", stream(["of ß"]))
    imported(tmp_path)
    read_model(tmp_path / "m.model").tokens.encode("of ß")


@pytest.mark.parametrize("damage", ["{", '{"format": 99}'])
def test_the_tokenizer_of_a_dataset_is_copied_or_made_again(talk, tmp_path, damage):
    folder = shutil.copytree(talk, tmp_path / "talk")
    tokenizer = folder / "tokenizer.json"
    digest = read_tokens(tokenizer).digest
    with refused("tokens/stored.py", "or delete that of a dataset"):
        tokens_in(folder, "another")
    tokenizer.write_text(damage)
    with refused("tokens/stored.py", "delete it and {}, and run `snakemake datasets/{}`"):
        read_tokens(tokenizer)
    tokenizer.unlink()
    (folder / "metadata.json").unlink()
    made, settings = talk.parent / "tokenizer.json", dataset(validation=0.1, format="chat")
    build_metadata(folder, "talk", settings, source={}, parts=["000"], tokenizer=made)
    assert tokens_in(folder, digest).digest == digest
    (alone := tmp_path / "tokenizer.json").write_text(damage)
    with refused("tokens/stored.py", "copy it again from where it was made, or delete it and run {command}"):
        read_tokens(alone)
    shutil.copyfile(made, alone)
    read_tokens(alone)


def test_the_tokenizer_of_another_model_has_a_token_that_begins_documents(tmp_path):
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models

    from spider.tokens.foreign import ForeignTokens

    plain = Tokenizer(models.BPE({"a": 0, "b": 1, "<s>": 2}, []))
    with refused("tokens/foreign.py", "set bos_token in its tokenizer_config.json"):
        ForeignTokens(transformers.PreTrainedTokenizerFast(tokenizer_object=plain))
    ForeignTokens(transformers.PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<s>"))
