"""Write shards like published ones: documents in tokens of a SentencePiece model, in files of one size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spider.config import Config, load_config
from spider.data.shards import HEADER_INTS, HEADER_MAGIC, Metadata, build_metadata
from tests.unit.tokens.sentencepiece_file import NORMAL, PIECES, in_pieces, write_model
from tests.unit.tokens.texts import texts

BOS, EOS, UNK = 1, 2, 3
SIZE = 272 + sum(piece_type == NORMAL for _, piece_type in PIECES)


def shard(path: Path, ids: Sequence[int], magic: int = HEADER_MAGIC, version: int = 1) -> Path:
    header = np.zeros(HEADER_INTS, "<i4")
    header[:3] = magic, version, len(ids)
    path.write_bytes(header.tobytes() + np.array(ids, "<u2").tobytes())
    return path


def stream(documents: Sequence[str]) -> list[int]:
    return [i for text in documents for i in (BOS, *in_pieces(text))]


def config_of(folder: Path, **source: Any) -> dict[str, Any]:
    """Return a configuration with a run of a small GPT on the shards of a folder."""
    shards = {"kind": "tokens", "model": str(folder / "m.model"), "vocab_size": SIZE}
    shards |= {"train": [f"{folder}/train_*.bin"], "validation": [f"{folder}/val_*.bin"], **source}
    model = {"family": "gpt", "hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "ffn_ratio": 2}
    settings = {"seq_len": 32, "micro_batch": 2, "lr": 1e-3, "log_every": 2, "ckpt_every": 2}
    evaluation = {"max_bytes": 400, "loops_bytes": 0, "sample_bytes": 8, "prompts": ["of the"]}
    run = {"data": "web", "model": model, "precision": "fp32", "defaults": settings, "evaluation": evaluation}
    run |= {"stages": [{"name": "a", "max_steps": 4}]}
    return {"results": str(folder / "results"), "datasets": {"web": {"source": shards}}, "runs": {"r": run}}


def publish(folder: Path, count: int = 40, size: int = 3000, **model: Any) -> list[str]:
    """Write a model, two training shards and a held-out one; return the documents, the held-out ones last.

    The first shard ends in the middle of a document.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "m.model", **model)
    documents = [f"of the {i} {text[:300]}" for i, text in enumerate(texts(count))]
    held_out = count - count // 4
    ids = stream(documents[:held_out])
    size = min(size, len(ids) // 2)
    assert ids[size] != BOS
    shard(folder / "train_000.bin", ids[:size])
    shard(folder / "train_001.bin", ids[size:])
    shard(folder / "val_000.bin", stream(documents[held_out:]))
    return documents


def import_shards(folder: Path, config: Config | None = None) -> Metadata:
    """Import all shards into ``folder/shards``."""
    dataset = (config or load_config(config_of(folder))).datasets["web"]
    source, shards = dataset.source, folder / "shards"
    for part in source.parts():
        source.import_part(Path(source.item(part)), shards, part, dataset)
    origins = [source.imported(part, shards / f"train/{part}.json") for part in source.parts()]
    description = source.changed() | {"files": origins}
    return build_metadata(
        shards, "web", dataset, source=description, parts=source.parts(), tokenizer=folder / "m.model"
    )
