"""Compare copies of primed compressors with compressors that code everything from scratch."""

import lzma
import math
import shutil
import subprocess

import brotli
import numpy as np
import pyppmd
import pytest
import zstandard

from spider.config import scored
from spider.config.run import EvaluationConfig
from spider.evaluation.baselines import (
    COMPRESSORS,
    absent_byte,
    bits,
    boundary_bits,
    same_tables,
    zpaq_size,
)

DOCUMENTS = [
    b"It was a bright cold day in April. " * 9,
    "the %d clocks were striking thirteen. Größe, 東京. ".encode() * 20,
    b"x",
]
TEXT = b"".join(DOCUMENTS)
GIVEN = b"".join(b"%d bright clocks were striking %d times in April. " % (i, i * i) for i in range(400))
STREAMS = [name for name in COMPRESSORS if name != "zpaq"]
ALONE = [[document] for document in DOCUMENTS]


def from_scratch(name: str, given: bytes, text: bytes) -> int:
    """Return the bytes of a stream that holds both texts, flushed between them where the library can."""
    if name == "ppmd":
        encoder = pyppmd.Ppmd7Encoder(24, 1 << 26)
        return len(encoder.encode(given) + encoder.encode(text) + encoder.flush())
    if name == "zstd":
        size = len(given) + max(map(len, [TEXT, text]))
        settings = zstandard.ZstdCompressionParameters.from_level(22, source_size=size)
        stream = zstandard.ZstdCompressor(compression_params=settings).compressobj()
        before = stream.compress(given) + (stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK) if given else b"")
        return len(before + stream.compress(text) + stream.flush())
    if name == "brotli":
        stream = brotli.Compressor(quality=11, lgwin=24)
        before = stream.process(given) + (stream.flush() if given else b"")
        return len(before + stream.process(text) + stream.finish())
    return len(lzma.compress(given + text, preset=9))


@pytest.mark.parametrize("given", [b"", GIVEN], ids=["nothing", "given"])
@pytest.mark.parametrize("name", STREAMS)
def test_a_copy_of_a_primed_compressor_costs_what_coding_everything_from_scratch_costs(name, given):
    carried, *alone = bits(name, given, [DOCUMENTS, *ALONE])
    end = from_scratch(name, given, b"")
    assert sum(carried) == 8 * (from_scratch(name, given, TEXT) - end)
    assert [sum(one) for one in alone] == [8 * (from_scratch(name, given, d) - end) for d in DOCUMENTS]
    assert len(carried) == len(DOCUMENTS)


@pytest.mark.parametrize("name", STREAMS)
def test_a_copy_learns_from_earlier_documents_only_with_what_came_before(name):
    noise = np.random.default_rng(0).bytes(20_000)
    carried, first, second = bits(name, b"", [[noise, noise], [noise], [noise]])
    assert sum(first) == sum(second) >= 8 * len(noise)
    assert sum(carried) < 1.05 * sum(first)
    ((again,),) = bits(name, noise, [[noise]])
    assert again < 0.05 * sum(first)


@pytest.mark.skipif(not shutil.which("xz"), reason="no xz command to compare with")
def test_the_rate_of_xz_is_that_of_the_command_xz_9():
    packed = subprocess.run(["xz", "-9", "-c"], input=GIVEN, capture_output=True, check=True).stdout
    ((cost,),) = bits("xz", b"", [[GIVEN]])
    container = 32  # head, index and foot of an empty file, which do not count
    assert cost == pytest.approx(8 * (len(packed) - container), rel=0.02)


def test_pieces_of_ppmd_add_up_to_the_whole():
    pieces = [TEXT[i : i + 37] for i in range(0, len(TEXT), 37)]
    apart, whole = bits("ppmd", GIVEN, [pieces, [TEXT]])
    assert sum(apart) == sum(whole) and len(apart) == len(pieces)
    ((fresh, known),) = bits("ppmd", GIVEN, [[GIVEN[-90:][::-1], GIVEN[-90:][::-1]]])
    assert known < fresh / 2


def test_a_boundary_is_a_byte_that_no_text_has():
    assert absent_byte("Größe, 東京".encode()) == b"\xff" == absent_byte(b"")
    assert absent_byte(b"\xff\xfe" + bytes(range(0xFC))) == b"\xfd"
    assert absent_byte(bytes(range(256))) == b""


def test_a_change_of_the_settings_measures_again_and_scores_nothing():
    """Raise the version when you change a setting here, so that the compressors run again."""
    pinned = {3: ["7z PPMd, order 24", "xz -9", "zstd --ultra -22", "brotli -q 11"]}
    assert pinned == {scored.COMPRESSORS: [*COMPRESSORS.values()][:-1]}
    settings = EvaluationConfig(zpaq=True, training_bytes=1000)
    assert not settings.scoring() and not settings.checkpoint_scoring() and not settings.sampling()


def test_ppmd_has_the_memory_of_its_order():
    """A text that a model of order 24 fills is known again; with little memory, PPMd begins anew."""
    noise = np.random.default_rng(0).bytes(400_000)
    ((first, again),) = bits("ppmd", b"", [[noise, noise]])
    assert again < 0.1 * first
    full = pyppmd.Ppmd7Encoder(24, 1 << 22)
    assert len(full.encode(noise) + full.encode(noise) + full.flush()) > 0.9 * 2 * len(noise)


def test_boundaries_cost_what_their_places_cost():
    for size, documents in ((1, 1), (9, 1), (9, 4), (300, 300)):
        assert boundary_bits(size, documents) == pytest.approx(
            math.log2(math.comb(size - 1, documents - 1)), abs=1e-6
        )


def test_ppmd_states_the_bits_of_a_boundary_which_are_few_where_the_text_tells_it():
    """Bits of places are the most that a compressor needs, once it knows the byte."""
    rng = np.random.default_rng(0)
    words = [bytes(rng.choice(list(b"abcdefgh"), size=n).tolist()) for n in rng.integers(2, 9, 300)]
    told = [b" ".join(words[i] for i in rng.integers(0, 300, n)) + b".\n" for n in rng.integers(4, 16, 2000)]
    untold = [one[:-2] for one in told]
    cost = []
    for texts in (told, untold):
        pieces = [piece for text in texts for piece in (b"\xff", text)][1:]
        ((*found, _),) = bits("ppmd", b"", [pieces])
        cost.append(sum(found[1::2]) / boundary_bits(sum(map(len, texts)), len(texts)))
    assert 0 < cost[0] < 0.2 and cost[0] < cost[1] < 1.1


def test_the_size_of_zpaq_is_that_of_its_library():
    zpaq = pytest.importorskip("zpaq")
    packed = zpaq.compress(GIVEN, method="511,128,1", threads=1)
    assert zpaq_size(GIVEN) == len(packed) and zpaq.decompress(packed) == GIVEN


def test_zpaq_is_primed_only_with_a_text_that_keeps_the_size_of_its_tables():
    assert same_tables(0, 5 << 20) and same_tables(1000, 1000) and same_tables(27_000_000, 263_406)
    assert not same_tables((1 << 25) - 5000, 5000) and not same_tables(3 << 30, 1)


def test_an_error_of_a_copy_is_reported():
    with pytest.raises(RuntimeError, match="ppmd: the process of a copy ended without an answer"):
        bits("ppmd", b"", [["not bytes"]])
