"""Training on tokens: figures count bytes, and a checkpoint holds its tokenizer."""

import random
import signal
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spider import load_model
from spider.checkpoints.load import Checkpoint
from spider.common.errors import CheckpointError
from spider.config import TokenizerConfig, load_config
from spider.data.encode import encode_part
from spider.data.shards import build_metadata
from spider.data.tokenizer import learn
from spider.tokens.stored import read_tokens
from spider.training.stage import train
from tests.unit.small_datasets import dataset
from tests.unit.tokens.texts import texts
from tests.unit.training.disturb import Stop, crash_at, read_until
from tests.unit.training.outcomes import outcome

SETTINGS = dataset(validation=0.1)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a function that encodes one text by a tokenizer of a size, learned from a number of bytes."""
    root = tmp_path_factory.mktemp("data")
    table = pa.table({"text": texts(200), "id": [str(i) for i in range(200)]})
    pq.write_table(table, root / "000.parquet")

    def write(size, max_bytes):
        name = f"{size}-{max_bytes}"
        if not (root / name).exists():
            config = TokenizerConfig(data="text", vocab_size=size, max_bytes=max_bytes)
            learn([root / "000.parquet"], learned := root / f"{name}.json", "t", config, SETTINGS)
            encode_part(root / "000.parquet", root / name, "000", SETTINGS, read_tokens(learned))
            build_metadata(root / name, "text", SETTINGS, source={}, parts=["000"], tokenizer=learned)
        return root / name

    return write


def spec(stage="a", size=300):
    source = {"source": {"kind": "pydocs"}}
    run = {
        "data": "text",
        "model": {"family": "tests.families.toy", "width": 8},
        "precision": "fp32",
        "defaults": {"seq_len": 16, "micro_batch": 4, "max_steps": 4, "ckpt_every": 2},
        "stages": [{"name": "a"}, {"name": "b"}],
    }
    tokenizers = {"t": {"data": "text", "vocab_size": size}}
    plain = {"datasets": {"text": source | {"tokenizer": "t"}}, "tokenizers": tokenizers, "runs": {"r": run}}
    return load_config(plain).stage("r", stage)


def test_training_counts_bytes_and_a_checkpoint_holds_its_tokenizer(written, tmp_path):
    receipt = train(spec(), tmp_path / "a", written(300, 10**6))
    assert receipt.tokens == 4 * 4 * 16 and receipt.bytes > 1.5 * receipt.tokens
    checkpoint = Checkpoint.at(tmp_path / "a")
    assert checkpoint.tokens.digest == read_tokens(written(300, 10**6) / "tokenizer.json").digest
    assert load_model(tmp_path / "a")[0].tokens.size == 300
    (checkpoint.path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Checkpoint.at(checkpoint.path)


def test_a_training_on_packed_answers_ends_with_the_same_bytes_after_a_kill(tmp_path, talk, talk_spec, start):
    train(talk_spec, tmp_path / "undisturbed", talk)
    with pytest.raises(Stop):  # within a log interval
        train(talk_spec, tmp_path / "killed", talk, on_step=crash_at(5))
    draw = random.Random()
    process = start(talk_spec, tmp_path / "killed", data=talk)
    read_until(process, draw.randrange(5, 11))
    time.sleep(draw.uniform(0, 0.01))
    process.kill()
    assert process.wait() == -signal.SIGKILL
    train(talk_spec, tmp_path / "killed", talk)
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "undisturbed")
