"""Test where a text is cut into patches, what is shown for each byte, and the command that shows it."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from rich.console import Console

from spider.checkpoints.save import save as save_checkpoint
from spider.cli import cli
from spider.cli.model import TINTS, show
from spider.config import load_config, merged
from spider.evaluation import result
from spider.evaluation.inside import cut
from spider.evaluation.result import CutText, Piece, Segment
from spider.model import build_model
from spider.model.interface import model_tensors
from spider.model.reading import Scoring
from spider.model.spider.config import SpiderConfig
from spider.model.spider.model import Spider
from spider.report.page import results_page
from spider.tokens import BYTES
from tests.unit.model.small import SMALL, EveryNth
from tests.unit.records import saved

BOS, EOS = BYTES.bos, BYTES.eos

ODD = "für 'x|y'\tda\x1b[31m\u200b\r\n".encode() + b"\xff \xe2\x82 <script>alert(1)</script> $x^2$ &amp; end"


def small_model(**changes) -> Spider:
    torch.manual_seed(3)
    return build_model(SpiderConfig(**merged(SMALL, changes))).eval()


def ids(data: bytes) -> np.ndarray:
    return np.array([BOS, *data], np.uint16)


def text_of(data: bytes, seq_len: int = 512, stride: int | None = None, **boundary) -> CutText:
    """Cut a text by a model, or after every ``stride`` bytes."""
    model = small_model(boundary=boundary | ({"capacity": 1.0} if stride else {}))
    if stride:
        model.chunker.boundary_predictor = EveryNth(stride)
    return cut(model, model.inspector(), ids(data), Scoring(seq_len=seq_len))


def cut_by(data: bytes, seq_len: int = 512, stride: int | None = None, **boundary) -> list[Segment]:
    return text_of(data, seq_len, stride, **boundary).segments


def texts(patches: list[Segment]) -> list[str]:
    return ["".join(piece.text for piece in patch.pieces) for patch in patches]


# ---------------------------------------------------------------------------------------------- boundaries


def test_whitespace_patches_close_at_the_first_space_of_a_run_in_any_windows():
    data = b"one two  three\nfour five  six " * 9
    patches = cut_by(data, kind="whitespace")
    assert texts(patches)[:5] == ["one ", "two ", " three↵\n", "four ", "five "]
    assert sum(patch.size for patch in patches) == len(data) and all(patch.closed for patch in patches)
    assert cut_by(data, seq_len=32, kind="whitespace") == patches


def test_learned_patches_are_those_of_the_forward_pass():
    model = small_model(boundary={"rate": 0.4})
    data = b"The quick brown fox jumps over the lazy dog, and sleeps."
    patches = cut(model, model.inspector(), ids(data), Scoring(seq_len=128)).segments
    padded_BT = torch.full((1, 128), 256)
    padded_BT[0, : len(data) + 1] = torch.from_numpy(ids(data).astype(np.int64))
    with torch.inference_mode():
        row_T = model(padded_BT, trace=True).trace.patches.row_BT[0].tolist()
    closes = [t for t in range(1, len(data) + 1) if row_T[t] > row_T[t - 1]]
    ends = np.cumsum([patch.size for patch in patches if patch.closed]).tolist()
    assert ends == closes and len(ends) > 5
    assert "".join(texts(patches)) == data.decode()
    assert all((patch.probability > 0.5) if patch.closed else patch.probability is None for patch in patches)


# --------------------------------------------------------------------------------------------- readable text


def test_a_character_cut_by_a_boundary_is_shown_as_bytes_in_both_patches():
    whole = cut_by("ab€".encode(), stride=6)
    assert texts(whole) == ["ab€"]
    halves = cut_by("ab€".encode(), stride=4)
    assert texts(halves) == [r"ab\xe2", r"\x82\xac"]
    assert halves[0].pieces == (Piece("ab"), Piece(r"\xe2", mark=True))


def test_characters_without_a_glyph_are_visible():
    shown = "".join(texts(cut_by(ODD, stride=500)))
    assert shown.startswith("für 'x|y'→da\\x1b[31m\\u200b\\x0d↵\n\\xff \\xe2\\x82 <script>")
    assert "\x1b" not in shown
    cut_text = text_of(ODD, rate=0.5)
    assert "\x1b" not in printed(cut_text)
    page = results_page("<title> & more", [result.Result(title="", figures=[cut_text])])
    assert "<script" not in page and "\x1b" not in page


# ------------------------------------------------------------------------------------------ terminal and page


def printed(patches: CutText, **console) -> str:
    out = io.StringIO()
    show(patches, Console(file=out, **console))
    return out.getvalue()


def test_a_bar_or_colours_show_where_a_patch_closes(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    patches = text_of(b"one two\nthe|end", kind="whitespace")
    assert printed(patches) == "one |two↵|\nthe\\x7cend\n"
    out = printed(patches, force_terminal=True, color_system="truecolor")
    assert re.sub(r"\x1b\[[0-9;]*m", "", out) == "one two↵\nthe|end\n"
    first, second = (";".join(str(int(tint[i : i + 2], 16)) for i in (1, 3, 5)) for tint in TINTS[:2])
    assert f"48;2;{first}mone " in out and f"48;2;{second}mtwo" in out
    assert out.endswith("\x1b[0m\nthe|end\n")  # the open end is not coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert printed(patches, force_terminal=True, color_system="truecolor") == printed(patches)


# --------------------------------------------------------------------------------------------- the command


@pytest.fixture
def save(tmp_path):
    """Return a function that saves a checkpoint of a small model with given boundaries."""

    def make(**boundary) -> Path:
        stage = {"name": "main", "max_steps": 1, "seq_len": 64}
        run = {"data": "d", "stages": [stage]}
        run["model"] = merged(SMALL, {"preset": "tiny", "boundary": boundary})
        datasets = {"d": {"source": {"kind": "pydocs"}}}
        spec = load_config({"datasets": datasets, "runs": {"demo": run}}).stage("demo", "main")
        model = build_model(spec.model)
        record = saved(spec=spec.model_dump(mode="json"))
        return save_checkpoint(tmp_path / "checkpoints", model_tensors(model), record).path

    return make


def run(*arguments: object, stdin: bytes = b"") -> Result:
    return CliRunner().invoke(cli, ["boundaries", *map(str, arguments)], input=stdin)


def test_the_command_shows_a_file_or_standard_input_or_writes_a_page(save, tmp_path):
    folder, text = save(kind="whitespace"), tmp_path / "some <text> $x$"
    text.write_bytes(b"one two\nthree \xff")
    for done in (run(folder, text), run(folder, "-", stdin=text.read_bytes())):
        assert done.exit_code == 0, done.output
        assert done.stdout == "one |two↵|\nthree |\\xff\n"
        assert done.stderr.count("Whitespace boundaries: 3 in 15 bytes, 4.67 bytes a patch.") == 1
    assert run(folder, text, "--bytes", 5).stdout == "one |t\n"
    done = run(folder, text, "--html", tmp_path / "a.html")
    assert done.exit_code == 0 and done.stdout == ""
    page = (tmp_path / "a.html").read_text()
    assert '<h1 class="long">some &lt;text&gt; $x$: patches of demo, stage main</h1>' in page
    assert "<span" in page and not re.search(r"https?://|src=|@import", page)  # it loads no other file
    text.write_bytes(b"word " * 100)
    done = run(folder, text)
    assert done.stdout == "word |" * 100 + "\n", "a longer text is read in windows"
    assert done.stderr.count("the text is longer than 64 tokens") == 1
    assert "is longer than" not in run(folder, text, "--context", 501).stderr


def test_errors_name_what_cannot_be_shown(save, tmp_path):
    folder, empty = save(kind="none"), tmp_path / "empty"
    empty.touch()
    (tmp_path / "text").write_text("text")
    for arguments, message in (
        ((folder, tmp_path / "text"), "this model has no patches (boundary.kind is none)"),
        ((folder, empty), "empty is empty: nothing to show"),
        ((folder, "-"), "the standard input is empty: nothing to show"),
        ((tmp_path / "text", tmp_path / "text"), "text: not a training receipt; give a checkpoint"),
    ):
        done = run(*arguments)
        assert isinstance(done.exception, ValueError) and message in str(done.exception)
