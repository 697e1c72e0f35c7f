"""Make the text that the models read: text in bytes, or made-up ids of a large vocabulary.

Speed depends on the number of ids and on how often each is looked up, not on their meaning. So ids are drawn
by Zipf's law, the n-th of them with frequency 1/n as in text, in documents as long as the web's. No tokenizer
is learned and nothing is encoded.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from bundle import DATASET, FOLDER

from spider.common.files import write_json
from spider.config import Dataset, StageSpec
from spider.data.packing import pack
from spider.data.shards import DTYPE, build_metadata, load_metadata
from spider.data.sources.mock import MOCK, make_mock_data
from spider.tokens import BYTES
from spider.tokens.stored import TOKENIZER, BpeTokens, LearnedFrom, StoredTokens

IDS = 4_000_000
"""Ids of made-up text."""
#: Median and spread of a document's ids (log-normal). Documents of 2,048 and more have a quarter of all ids.
MEDIAN, SPREAD = 561, 0.8


def text_for(spec: StageSpec) -> Path:
    """Return the folder of encoded text for a stage, packed if its rows are packed."""
    folder = corpus()[1] if spec.model.vocab_size is None else made_ids(spec.model.vocab_size)
    if spec.settings.packing == "best_fit" and not (folder / f"packed-{spec.settings.seq_len}.json").exists():
        pack(folder, spec.settings.seq_len)
    return folder


def corpus() -> tuple[str, Path]:
    """Return name and folder of text in bytes: the bundle's if it is unpacked, else made-up text."""
    bundled = FOLDER / "results/shards" / DATASET
    if (bundled / "metadata.json").exists():
        return DATASET, bundled
    mock = FOLDER / "results/shards" / MOCK
    make_mock_data(mock)
    return MOCK, mock


def made_ids(vocab_size: int, count: int = IDS) -> Path:
    """Return the folder of some ``count`` ids of a vocabulary, which is made once.

    Its tokenizer has pairs of bytes that were not learned from text.
    """
    folder = FOLDER / "results/shards" / f"made-{vocab_size}"
    if (folder / "metadata.json").exists():
        load_metadata(folder)
        return folder
    tokens = BpeTokens([(i >> 8, i & 255) for i in range(vocab_size - BYTES.size)])
    nothing = LearnedFrom(documents=0, bytes=0)
    StoredTokens.of_merges(tokens, nothing).write(folder / TOKENIZER)
    dataset, draw = Dataset.model_validate({"source": {"kind": "mock"}}), np.random.default_rng(0)
    text_ids = np.flatnonzero(tokens.bytes_of)
    for split in dataset.splits:
        lengths = np.exp(draw.normal(np.log(MEDIAN), SPREAD, count // 800)).astype(np.int64) + 3
        ids = text_ids[(len(text_ids) ** draw.random(lengths.sum())).astype(np.int64) - 1].astype(DTYPE)
        begins = np.cumsum(lengths) - lengths
        ids[begins], ids[begins + lengths - 1] = tokens.bos, tokens.eos
        name = folder / split / "000"
        name.parent.mkdir(exist_ok=True)
        ids.tofile(name.with_suffix(".bin"))
        (begins * DTYPE.itemsize).astype("<u8").tofile(name.with_suffix(".idx"))
        counts = {"tokens": len(ids), "documents": len(lengths), "bytes": int(tokens.bytes_of[ids].sum())}
        record = {"file": f"{split}/000.bin", "part": "000", **counts, **dataset.encoding()}
        write_json(name.with_suffix(".json"), record | {"tokenizer": tokens.digest})
    source, tokenizer = {"kind": "made-up ids"}, folder / TOKENIZER
    build_metadata(folder, folder.name, dataset, source=source, parts=["000"], tokenizer=tokenizer)
    return folder
