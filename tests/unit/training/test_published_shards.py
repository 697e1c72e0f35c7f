"""Published shards are trained on and scored, with the bytes that the golf script counts."""

import numpy as np
import pytest

from spider.config import load_config
from spider.data.shards import Shards
from spider.evaluation.evaluate import evaluate
from spider.evaluation.golf_bytes import golf_bytes
from spider.tokens import BYTES
from spider.tokens.stored import read_tokens
from spider.training.stage import train
from tests.unit.data.published import config_of, import_shards, publish


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Publish shards of normalised text."""
    publish(folder := tmp_path_factory.mktemp("published"), normalizer="nmt_nfkc")
    return folder


def test_evaluation_scores_the_text_of_the_shards_and_counts_as_the_golf_script_on_request(folder):
    import_shards(folder)
    config = config_of(folder)
    config["runs"]["r"]["evaluation"]["measurements"] = {"spider.evaluation.golf_bytes": {}}
    spec = load_config(config).stage("r", "a")
    train(spec, folder / "r/a", folder / "shards")
    measured = evaluate(folder / "r/a/train.json", spec, folder / "shards", folder / "r/a")
    view = Shards(folder / "shards", "validation")
    text = view.vocabulary.raw(view.read(0, view.tokens))[: measured.bytes]
    assert not measured.lossless and measured.targets["byte"] == measured.bytes == len(text) >= 400
    bpb, count = measured.results["spider.evaluation.golf_bytes"].rows
    assert bpb.value == measured.bpb_strict * measured.bytes / count.value
    assert bpb.carried.value == measured.bpb_strict_carried * measured.bytes / count.value


def test_the_golf_script_leaves_out_a_first_blank_and_counts_inner_marks_as_three_bytes(folder):
    tokens = read_tokens(folder / "m.model")
    ids = {piece: tokens.size - len(tokens.pieces) + i for i, (piece, _) in enumerate(tokens.pieces)}
    pieces = ["▁the", "▁the", "of▁the", "▁▁", "日本", "▁"]
    stream = [tokens.bos, *(ids[piece] for piece in pieces), ord("x"), ids["▁the"], tokens.eos]
    stream += [tokens.bos, ids["▁"], tokens.eos, tokens.bos, ids["of"]]
    #          3, then 4, of▁the, ▁▁, 日本, ▁; x and 4; a document of one blank; of
    expected = 3 + 4 + 8 + 4 + 6 + 1 + 1 + 4 + 0 + 2
    assert golf_bytes(np.array(stream, np.uint16), tokens) == expected
    with pytest.raises(ValueError, match=r"golf_bytes: counts pieces of a SentencePiece model"):
        golf_bytes(BYTES.encode("text"), BYTES)
