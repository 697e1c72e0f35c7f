"""Compare compressors with their command lines, and the cost of pieces with that of the whole."""

import bz2
import lzma
import shutil
import subprocess
import zlib

import numpy as np
import pytest

from spider.evaluation.compressors import COMPRESSORS, Ppmd, bits

TEXT = (
    "It was a bright cold day in April, and the clocks were striking thirteen. Größe, 東京. " * 40
).encode()
GIVEN = b"".join(b"%d bright clocks were striking %d times in April. " % (i, i * i) for i in range(400))


@pytest.mark.parametrize("given", [b"", GIVEN])
def test_rates_are_those_of_the_strongest_settings_on_the_concatenation(given):
    packs = {
        "zlib": lambda text: zlib.compress(text, 9),
        "bz2": lambda text: bz2.compress(text, 9),
        "xz": lambda text: lzma.compress(text, preset=9),
    }
    for name, pack in packs.items():
        before = len(pack(given)) if given else 0
        assert bits(name, given, [TEXT]) == [8 * (len(pack(given + TEXT)) - before)]


@pytest.mark.skipif(not shutil.which("xz"), reason="no xz command to compare with")
def test_the_rate_of_xz_is_that_of_the_command_xz_9():
    packed = subprocess.run(["xz", "-9", "-c"], input=TEXT, capture_output=True, check=True).stdout
    assert bits("xz", b"", [TEXT])[0] == pytest.approx(8 * len(packed), rel=0.02)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_given_text_costs_almost_nothing_and_noise_costs_its_full_size(name):
    noise = np.random.default_rng(0).bytes(20_000)
    alone, again = bits(name, b"", [noise])[0], bits(name, noise, [noise])[0]
    assert alone >= 8 * len(noise)
    if name != "bz2":  # sorting blocks still leaves the cost of distinguishing the copies
        assert again < 0.05 * alone


def test_pieces_of_ppmd_add_up_to_the_whole():
    pieces = [TEXT[i : i + 37] for i in range(0, len(TEXT), 37)]
    assert sum(Ppmd(GIVEN, len(TEXT)).bits(pieces)) == sum(Ppmd(GIVEN, len(TEXT)).bits([TEXT]))
    fresh, known = Ppmd(GIVEN, 180).bits([TEXT[:90], TEXT[90:180]])
    assert known < fresh / 2
