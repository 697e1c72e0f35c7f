"""The text that models are measured on: the beginning of a validation split, in a model's own alphabet."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from spider.data.metadata import load_metadata
from spider.data.shards import Shards
from spider.evaluation.bpb import clip_stream
from spider.tokens import BYTES, Tokens


def validation_stream(data: Path, max_bytes: int, tokens: Tokens = BYTES) -> tuple[np.ndarray, str]:
    """The first ``max_bytes`` bytes of the validation split as a uint16 stream of a model's ``tokens``, and
    the dataset's digest; `ValueError` where there is no validation text.

    The text is cut in bytes and then encoded, whatever the shards are written in: so with every alphabet the
    same text is scored, and as many bytes. Special ids are the same in all and stay where they are. Of shards
    that others have written the text is cut behind an id of theirs, and is scored in their alphabet as the
    ids that stand there, for another might cut it otherwise.
    """
    metadata = load_metadata(data)
    split = metadata.splits.get("validation")
    if split is None or not split.bytes:
        raise ValueError(
            f"{data}: has no validation text to score; raise `validation` in datasets.{metadata.dataset} "
            "(the share of documents held out) and encode again"
        )
    shards = Shards(data, "validation")
    # A document of n bytes is n + 2 ids at most, and encoding drops empty ones: three a byte are enough.
    count = min(shards.tokens, 3 * max_bytes)
    written = metadata.alphabet
    stream_N = clip_stream(np.asarray(shards.read(0, count)), max_bytes, written)
    if written.digest == tokens.digest and (written.digest is None or metadata.imported):
        return stream_N, metadata.digest
    left, pieces = len(written.raw(stream_N)) if metadata.imported else max_bytes, []
    for run_N in np.split(stream_N, np.flatnonzero(np.diff(written.bytes_of[stream_N] > 0)) + 1):
        text = written.raw(run_N)[:left]
        left -= len(text)
        pieces.append(tokens.encode(text)[1:-1] if text else run_N)
    return np.concatenate(pieces), metadata.digest
