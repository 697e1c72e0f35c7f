"""The online mixer: its cost is a code length, and it forgets what it must forget."""

import argparse
import inspect
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from spider_lab.mixer import Mixer, check_tokens, prime_stream
from spider_lab.mixing import Learned
from test_trial import plain, trained  # noqa: F401 (a fixture)

from spider.common.results import Results
from spider.config import load_config
from spider.data.encode import encode_part
from spider.data.shards import Shards, build_metadata
from spider.evaluation.bpb import score
from spider.evaluation.evaluate import evaluate
from spider.evaluation.text import LearnedFrom, Text
from spider.model.reading import Scoring
from spider.tokens import BYTES
from tests.advice.followed import refused
from tests.unit.evaluation.toys import Bigram, Pairs
from tests.unit.small_datasets import dataset

RATE = 0.005
SOURCE = inspect.getsource(argparse).encode()
MODEL = Bigram()
READING = Scoring(seq_len=16, overlap=0.5, batch=4)


def stream(*documents: bytes) -> np.ndarray:
    return np.concatenate([BYTES.encode(document) for document in documents])


def log_p_of(tokens_N: np.ndarray) -> np.ndarray:
    """Return the logarithms of the model's probabilities before each id but the first."""
    return MODEL.table_VV.detach().log_softmax(-1).numpy()[tokens_N[:-1]]


def nats(tokens_N: np.ndarray, **kept) -> np.ndarray:
    mixer = Mixer(BYTES, RATE, **kept)
    mixer.read(tokens_N[1:].astype(np.int64), log_p_of(tokens_N))
    return np.concatenate(mixer.nats)


class Coder:
    """A binary arithmetic coder of 32 bits without carries, as in lpaq (Mahoney). It decodes given bytes."""

    def __init__(self, coded: bytes | None = None) -> None:
        self.low, self.high, self.out = 0, 0xFFFFFFFF, bytearray()
        self.coded = iter(coded or b"")
        self.decodes = coded is not None
        self.value = 0
        for _ in range(4 * self.decodes):
            self._read()

    def _read(self) -> None:
        self.value = (self.value << 8 | next(self.coded, 0)) & 0xFFFFFFFF

    def code(self, p: float, bit: int | None = None) -> int:
        """Code a bit whose probability of being one is p; decode it and return it if it is None."""
        share = min(max(int(p * (1 << 24)), 1), (1 << 24) - 1)
        middle = self.low + ((self.high - self.low) * share >> 24)
        if bit is None:
            bit = int(self.value <= middle)
        if bit:
            self.high = middle
        else:
            self.low = middle + 1
        while (self.low ^ self.high) >> 24 == 0:
            self.out.append(self.high >> 24)
            self.low = self.low << 8 & 0xFFFFFFFF
            self.high = (self.high << 8 | 0xFF) & 0xFFFFFFFF
            if self.decodes:
                self._read()
        return bit

    def end(self) -> bytes:
        return bytes(self.out) + self.high.to_bytes(4, "big")


def code(coder: Coder, count: int, text: bytes | None = None) -> bytes:
    """Encode a text of ``count`` bytes, or decode it, with a mixer that reads one byte after the other."""
    mixer = Mixer(BYTES, RATE)
    log_p_VV = MODEL.table_VV.detach().log_softmax(-1).numpy()
    read = bytearray()
    for n in range(count):
        log_p_V = log_p_VV[read[-1] if read else BYTES.bos]
        sums = np.append(0, np.cumsum(np.exp(mixer.log_p(log_p_V))[:256])).tolist()
        low, high = 0, 256
        while high - low > 1:
            middle = (low + high) // 2
            p = (sums[high] - sums[middle]) / (sums[high] - sums[low])
            bit = coder.code(p, None if text is None else int(text[n] >= middle))
            low, high = (middle, high) if bit else (low, middle)
        read.append(low)
        mixer.read(np.array([low]), log_p_V[None])
    return bytes(read)


def test_a_decoder_with_its_own_mixer_gets_the_text_back_from_as_many_bytes_as_the_cost_says():
    text = SOURCE[:3000]
    encoder = Coder()
    code(encoder, len(text), text)
    coded = encoder.end()
    assert code(Coder(coded), len(text)) == text
    tokens_N = stream(text)
    bytes_N = np.exp(log_p_of(tokens_N)[:-1, :256]).sum(1, dtype=np.float64)  # the coder codes no special ids
    stated = (nats(tokens_N)[:-1] + np.log(bytes_N)).sum() / math.log(2) / 8
    assert len(coded) == pytest.approx(stated, abs=20)
    assert stated < 0.8 * len(text)


def test_probabilities_of_all_ids_sum_to_one_at_every_position():
    tokens_N = stream(SOURCE[:200], b"", SOURCE[100:250])
    log_p_SV = log_p_of(tokens_N)
    mixer = Mixer(BYTES, RATE)
    for target, log_p_V in zip(tokens_N[1:].astype(int), log_p_SV, strict=True):
        p_V = np.exp(mixer.log_p(log_p_V))
        assert p_V.sum() == pytest.approx(1, abs=1e-6)
        np.testing.assert_allclose(p_V[256:], np.exp(log_p_V[256:]), rtol=1e-6)
        mixer.read(np.array([target]), log_p_V[None])
        assert mixer.nats[-1][0] == pytest.approx(-math.log(p_V[target]), abs=1e-9)
    assert 0 < mixer.deviation < 1e-6
    np.testing.assert_array_equal(np.concatenate(mixer.nats), nats(tokens_N))


@pytest.mark.parametrize("kept", [{}, {"keeps_text": False, "keeps_weights": False}])
def test_nothing_after_a_byte_changes_its_probability(kept):
    tokens_N = stream(SOURCE[:300], SOURCE[200:400])
    before = nats(tokens_N, **kept)
    for t in (1, 64, 301, 303, 400):
        changed_N = tokens_N.copy()
        changed_N[t:] = ord("~")
        after = nats(changed_N, **kept)
        assert np.array_equal(after[: t - 1], before[: t - 1]) and after[t - 1] != before[t - 1]


def test_a_document_alone_costs_the_same_after_any_other_and_less_with_what_came_before():
    documents = [SOURCE[:3000], "Größe\n".encode() * 20, SOURCE[2000:4000]]
    start = Learned.nothing()
    untouched = [array.copy() for array in start]
    together = nats(stream(*documents), start=start, keeps_text=False, keeps_weights=False)
    apart = np.concatenate([np.append(nats(stream(one)), 0) for one in documents])[:-1]
    ends = np.cumsum([len(BYTES.encode(one)) for one in documents])[:-1] - 1  # of the next BOS
    np.testing.assert_array_equal(np.delete(together, ends), np.delete(apart, ends))
    assert all(map(np.array_equal, start, untouched))
    carried = nats(stream(*documents))
    assert carried[: ends[0]].sum() == together[: ends[0]].sum()
    assert carried[ends[1] :].sum() < 0.6 * together[ends[1] :].sum()


def test_priming_forgets_the_text_and_keeps_the_weights():
    primer = Mixer(BYTES, RATE, keeps_text=False)
    tokens_N = stream(SOURCE[:2000], SOURCE[:2000], b"")
    primer.read(tokens_N[1:].astype(np.int64), log_p_of(tokens_N))
    first, second = np.split(np.concatenate(primer.nats), [2002])
    assert 0.6 * first.sum() < second[:2001].sum() < first.sum()
    text_N = stream(SOURCE[4000:6000])
    alone = {"keeps_text": False, "keeps_weights": False}
    assert nats(text_N, start=primer.state.learned, **alone).sum() < nats(text_N, **alone).sum()


def test_a_distribution_that_is_none_is_refused():
    tokens_N = stream(b"some text")
    target_S = tokens_N[1:].astype(np.int64)
    for wrong, message in ((np.nan, "within inf"), (-1.0, "sum to one only within")):
        log_p_SV = log_p_of(tokens_N)
        log_p_SV[4, 77] = wrong
        with pytest.raises(ValueError, match=f"probabilities of the model.*{message}"):
            Mixer(BYTES, RATE).read(target_S, log_p_SV)
    diverged = Bigram()
    with torch.no_grad():
        diverged.table_VV[ord("m")] = float("nan")
    with pytest.raises(ValueError, match="not finite: its weights have diverged"):
        score(diverged, tokens_N, READING, consume=Mixer(BYTES, RATE).read)


def test_tokens_of_several_bytes_are_refused():
    with refused("lab/mixer.py", "train a model over bytes, or leave the mixer out"):
        Mixer(Pairs(), RATE)
    check_tokens(BYTES)


def test_a_configuration_names_it_as_a_measurement(trained):  # noqa: F811
    config = plain(trained)
    config["runs"]["demo"]["evaluation"] |= {"measurements": {"spider_lab.mixer": {"prime": 0}}}
    config["runs"]["demo"]["evaluation"] |= {"carry_over": 1 << 12}
    spec, results = load_config(config).stage("demo", "main"), Results(trained)
    folder = results.stage("demo", "main")
    found = evaluate(folder.receipt, spec, results.shards("text"), trained / "mixed", device="cpu")
    (row,) = found.results["spider_lab.mixer"].rows
    assert row.value < 0.9 * found.bpb and row.carried.value < 0.8 * row.value
    low, high = row.interval
    assert low < row.value < high
    assert 0 < found.results["spider_lab.mixer"].metrics["mixer/deviation"] < 1e-5


@pytest.fixture(scope="module")
def learned_from(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "shards"
    texts = [f"Sentence {i} has a length above fifty bytes, so it counts as a document." for i in range(40)]
    parquet = folder.parent / "000.parquet"
    pq.write_table(pa.table({"text": texts, "id": [str(i) for i in range(40)]}), parquet)
    encode_part(parquet, folder, "000", dataset(validation=0.5))
    build_metadata(folder, "sentences", dataset(validation=0.5), source={"kind": "local"}, parts=["000"])
    return LearnedFrom(stages=[(folder / "train.json", folder)])


def test_the_prime_is_the_beginning_of_the_train_split_without_a_scored_document(learned_from):
    split = Shards(learned_from.stages[-1][1], "train")
    prime_N = prime_stream(learned_from, 300, Text.of(stream(SOURCE[:500]), BYTES))
    assert np.array_equal(prime_N, split.read(0, len(prime_N))) and len(BYTES.raw(prime_N)) == 300
    document = Text.of(prime_N, BYTES).documents()[1]
    for scored in (document, document[:60], document + b" And more."):  # one of them may be truncated
        text = Text.of(stream(SOURCE[:100], scored), BYTES)
        with refused("lab/mixer.py", "hold that document out of the training text, or set the key to 0"):
            prime_stream(learned_from, 300, text)
    prime_stream(learned_from, 300, text := Text.of(stream(document[:40]), BYTES))
    with pytest.raises(ValueError, match=r"mixer\.prime: 9,999 bytes are more than the train split .* lower"):
        prime_stream(learned_from, 9999, text)
    with pytest.raises(ValueError, match=r"mixer\.prime: the training text cannot be read; set it to 0"):
        prime_stream(LearnedFrom(), 100, text)
