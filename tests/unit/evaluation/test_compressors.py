import bz2
import lzma
import shutil
import subprocess
import zlib

import numpy as np
import pytest

from spider.evaluation.compressors import SETTINGS, bits_per_byte
from spider.tokens import BYTES

TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. Größe, 東京. " * 40


def stream(*documents: str) -> bytes:
    """The text that such a stream of ids stands for."""
    return BYTES.raw(np.concatenate([BYTES.encode(d) for d in documents]))


def test_text_is_the_documents_bytes_without_special_ids():
    assert stream("näive", "", "x") == "näivex".encode()


def test_figures_are_those_of_the_strongest_settings_on_the_same_bytes():
    found = bits_per_byte(stream(TEXT, "tail"))
    text = (TEXT + "tail").encode()
    assert list(found) == list(SETTINGS) == ["zlib", "bz2", "xz", "zstd"]
    for name, packed in (
        ("zlib", zlib.compress(text, 9)),
        ("bz2", bz2.compress(text, 9)),
        ("xz", lzma.compress(text, preset=9)),
    ):
        assert found[name] == pytest.approx(8 * len(packed) / len(text))
    assert found["zstd"] < 1


@pytest.mark.skipif(not shutil.which("xz"), reason="no xz command to compare with")
def test_xz_figure_is_what_the_command_xz_9_gives():
    packed = subprocess.run(["xz", "-9", "-c"], input=TEXT.encode(), capture_output=True, check=True).stdout
    assert bits_per_byte(stream(TEXT))["xz"] == pytest.approx(8 * len(packed) / len(TEXT.encode()), rel=0.02)


def test_random_bytes_do_not_compress():
    noise = np.random.default_rng(0).bytes(20_000)
    assert all(bits >= 8 for bits in bits_per_byte(noise).values())


def test_a_stream_without_text_is_refused():
    with pytest.raises(ValueError, match="no text to compress"):
        bits_per_byte(stream("", ""))
