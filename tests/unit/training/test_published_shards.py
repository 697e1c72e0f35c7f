"""Published shards are imported, trained on, evaluated and exported."""

import numpy as np
import pytest

from spider.config import load_config
from spider.data.shards import Shards
from spider.evaluation.baselines import text_baselines
from spider.evaluation.evaluate import evaluate
from spider.evaluation.golf_bytes import golf_bytes
from spider.evaluation.overlap import find_overlap
from spider.evaluation.records import Evaluation
from spider.evaluation.text import LearnedFrom
from spider.report.tables import compare
from spider.tokens import BYTES
from spider.tokens.stored import read_tokens
from spider.training.stage import train
from tests.unit.data.published import config_of, import_shards, publish


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folder of shards of normalised text, that of a stage, and its evaluation."""
    folder = tmp_path_factory.mktemp("published")
    publish(folder, normalizer="nmt_nfkc")
    import_shards(folder)
    spec = load_config(config_of(folder)).stage("r", "a")
    train(spec, folder / "r/a", folder / "shards")
    return (
        folder,
        folder / "r/a",
        evaluate(folder / "r/a/train.json", spec, folder / "shards", folder / "r/a"),
    )


def test_evaluation_scores_the_text_of_the_shards_and_marks_its_results(trained):
    folder, stage, measured = trained
    assert not measured.lossless and Evaluation.read(stage / "evaluation.json") == measured
    view = Shards(folder / "shards", "validation")
    ids_N = view.read(0, view.tokens)
    text = view.vocabulary.raw(ids_N)[: measured.bytes]
    assert 400 <= measured.bytes < 416 and measured.targets["byte"] == measured.bytes == len(text)
    spec = load_config(config_of(folder)).stage("r", "a")
    overlap = find_overlap(spec, folder / "shards", LearnedFrom(), folder / "overlap.json")
    given = spec, folder / "shards", LearnedFrom(), overlap
    rates = text_baselines(*given, folder / "baselines.json")
    assert overlap.text_sha256 == rates.text_sha256 == measured.text_sha256, "the decoded text"
    compare([stage / "evaluation.json"], benchmarks=None, output=folder / "report")
    number = measured.score.rows[0].model_copy(update={"mark": "†"})
    assert str(number) in (folder / "report/table.md").read_text() and f"{measured.bpb:.4f}†" in str(number)


def test_bytes_are_counted_as_the_golf_script_counts_them_on_request(trained, tmp_path):
    folder, stage, plain = trained
    config = config_of(folder)
    config["runs"]["r"]["evaluation"]["measurements"] = {"spider.evaluation.golf_bytes": {}}
    spec = load_config(config).stage("r", "a")
    measured = evaluate(stage / "train.json", spec, folder / "shards", tmp_path)
    bpb, count = measured.results["spider.evaluation.golf_bytes"].rows
    assert measured.bpb == plain.bpb and bpb.value == measured.bpb_strict * measured.bytes / count.value
    assert bpb.carried.value == measured.bpb_strict_carried * measured.bytes / count.value


def test_the_golf_script_leaves_out_a_first_blank_and_counts_inner_marks_as_three_bytes(trained):
    tokens = read_tokens(trained[0] / "m.model")
    ids = {piece: tokens.size - len(tokens.pieces) + i for i, (piece, _) in enumerate(tokens.pieces)}
    pieces = ["▁the", "▁the", "of▁the", "▁▁", "日本", "▁"]
    stream = [tokens.bos, *(ids[piece] for piece in pieces), ord("x"), ids["▁the"], tokens.eos]
    stream += [tokens.bos, ids["▁"], tokens.eos, tokens.bos, ids["of"]]
    #          3, then 4, of▁the, ▁▁, 日本, ▁; x and 4; a document of one blank; of
    expected = 3 + 4 + 8 + 4 + 6 + 1 + 1 + 4 + 0 + 2
    assert golf_bytes(np.array(stream, np.uint16), tokens) == expected
    with pytest.raises(ValueError, match=r"golf_bytes: counts pieces of a SentencePiece model"):
        golf_bytes(BYTES.encode("text"), BYTES)
