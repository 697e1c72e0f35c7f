"""The stretches of a text that stand in the training text, against a search of every document."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner
from spider_trust.text_index import build, described
from spider_trust.trace import Corpus, corpora, trace

from spider.cli import cli
from spider.common.results import Results
from spider.config import TokenizerConfig, load_config
from spider.data.encode import encode_part
from spider.data.shards import build_metadata
from spider.data.tokenizer import learn
from spider.tokens import BYTES
from spider.tokens.stored import read_tokens
from spider.training.stage import train
from tests.unit.small_training import DEFAULTS

LEAST = 20
GPT = {"preset": "gpt-d12", "hidden": 32, "layers": 2, "heads": 2, "ffn_ratio": 1, "short_window": 16}


def documents(part):
    draw = np.random.default_rng(part)
    words = ["sun", "moon", "häuser", "river", "of", "the", "stone", "42", "\n", "and", "light", "falls"]
    return [" ".join(draw.choice(words, draw.integers(4, 60))) for _ in range(120)]


@pytest.fixture(scope="module", params=["bytes", "tokens"])
def indexed(request, tmp_path_factory):
    """Return the configuration and results of an indexed dataset of two parts, and its texts by document."""
    folder = tmp_path_factory.mktemp(request.param)
    dataset = {"source": {"kind": "pydocs"}, "validation": 0.1, "ngram": 0.4}
    run = {"data": "toy", "model": GPT, "precision": "fp32", "defaults": DEFAULTS, "stages": [{"name": "a"}]}
    written = {"results": str(folder / "results"), "datasets": {"toy": dataset, "other": dataset}}
    written["runs"] = {"r": run}
    if request.param == "tokens":
        written["tokenizers"] = {"bpe": {"data": "other", "vocab_size": 300}}
        written["datasets"]["toy"] = dataset | {"tokenizer": "bpe"}
    (folder / "config.yaml").write_text(yaml.safe_dump(written))
    config, results = load_config(folder / "config.yaml"), Results(folder / "results")
    settings, tokenizer = config.dataset("toy"), None
    files = []
    for part in ("000", "001"):
        texts = documents(int(part))
        results.raw("toy", part).parent.mkdir(parents=True, exist_ok=True)
        table = pa.table({"text": texts, "id": [f"{part}-{i}" for i in range(len(texts))]})
        pq.write_table(table, results.raw("toy", part))
        files.append({"part": part, "name": f"{part}.parquet", "sha256": part * 8, "bytes": 1})
    if request.param == "tokens":
        tokenizer = results.tokenizer("bpe")
        tokenizer.parent.mkdir(parents=True)
        raw = [results.raw("toy", "000")]
        learn(raw, tokenizer, "bpe", TokenizerConfig(data="toy", vocab_size=300), settings)
    tokens = read_tokens(tokenizer) if tokenizer else BYTES
    shards = results.shards("toy")
    for part in ("000", "001"):
        encode_part(results.raw("toy", part), shards, part, settings, tokens)
    source = {"kind": "pydocs", "files": files}
    build_metadata(shards, "toy", settings, source=source, parts=["000", "001"], tokenizer=tokenizer)
    for part in ("000", "001"):
        build(shards, part, described(results, "toy", part), largest=1500)
    held = {}
    for split in ("train", "ngram"):
        for part in ("000", "001"):
            rows = np.fromfile(shards / split / f"{part}.rows", "<u4").tolist()
            held |= {(split, part, row): documents(int(part))[row] for row in rows}
    return folder / "config.yaml", config, results, held


def brute(texts, query):
    """Return the longest stretches of a query that stand in one of these texts."""
    found = []
    everything = b"\xff".join(texts)
    end = 0
    for begin in range(len(query)):
        end = max(begin, end)  # a stretch that is found is also found without its first byte
        while end < len(query) and query[begin : end + 1] in everything:
            end += 1
        if end - begin >= LEAST and (not found or end > found[-1][1]):
            found.append((begin, end))
    return found


def test_queries_give_what_a_search_of_each_document_gives(indexed):
    _, config, results, held = indexed
    corpus = Corpus(config, results, "toy")
    assert len(corpus.pieces) > 8, "several pieces of a part"
    draw = np.random.default_rng(0)
    raw = {name: text.encode() for name, text in held.items()}
    texts, everything = [*raw.values()], [text.encode() for part in (0, 1) for text in documents(part)]
    other = [" ".join(draw.permutation(text.decode(errors="ignore").split())).encode() for text in texts]
    wrong = 0
    for number in range(25):
        for source in (everything, other):
            text = source[number % len(source)]
            length = int(draw.integers(LEAST, 200))
            begin = int(draw.integers(0, max(1, len(text) - length)))
            query = text[begin : begin + length]
            if len(query) < LEAST:
                continue
            found = trace(query, [corpus], LEAST)
            wrong += [(one.begin, one.end) for one in found.stretches] != brute(texts, query)
            for one in found.stretches:
                stretch = query[one.begin : one.end]
                assert one.count == sum(occurrences(text, stretch) for text in texts)
                for place in one.places:
                    assert stretch in raw[place.split, place.part, place.row]
                    assert place.id == f"{place.part}-{place.row}" and place.sha256 == place.part * 8
    assert wrong == 0


def occurrences(text, stretch):
    count, at = 0, text.find(stretch)
    while at >= 0:
        count, at = count + 1, text.find(stretch, at + 1)
    return count


def test_a_run_names_the_steps_that_read_a_stretch(indexed, tmp_path):
    path, config, results, held = indexed
    stage = results.stage("r", "a")
    if not stage.receipt.exists():
        train(config.stage("r", "a"), stage.path, results.shards("toy"))
    (source,) = corpora(config, results, "r", "a")
    long = [text for name, text in held.items() if name[0] == "train" and len(text) > 100]
    traced = {text: trace(text[:90].encode(), [source], LEAST, "r", "a").stretches[0] for text in long}
    text, stretch = next((text, one) for text, one in traced.items() if one.places[0].reads)
    (place,) = stretch.places
    assert place.split == "train" and stretch.end - stretch.begin == len(text[:90].encode())
    for read in place.reads:
        ids, _ = source.order.stage(read.stage).batch(read.step)
        wanted = source._views["train"].read(place.tokens[0], 1)
        last = source._views["train"].read(place.tokens[1] - 1, 1)
        assert {int(wanted[0]), int(last[0])} & set(ids[read.row].tolist())
    (tmp_path / "text").write_text(text[:90])
    done = CliRunner().invoke(
        cli, ["--config", str(path), "trace", str(tmp_path / "text"), "--run", "r", "--json"]
    )
    assert json.loads(done.output)["stretches"][0]["places"][0]["reads"]
    done = CliRunner().invoke(cli, ["--config", str(path), "trace", text[:90], "--run", "r"])
    assert "read at step a " in done.output and place.id in done.output


def test_bad_input(indexed):
    _, config, results, _ = indexed
    with pytest.raises(ValueError, match="a stretch to trace has at least 8 bytes, but the text has 5"):
        trace(b"short", [Corpus(config, results, "toy")], LEAST)
    with pytest.raises(ValueError, match=r"training text of other has no index; `snakemake .* text/other`"):
        _ = Corpus(config, results, "other").pieces
