"""The calculator of a model: Python's values, no other expression, and outputs of calls."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spider.evaluation.calculator import Calls, calculate
from spider.evaluation.generate import generate, stream_text
from spider.tokens import BYTES
from spider.tokens.turns import OUTPUT_END, OUTPUT_START, PYTHON_END, PYTHON_START, TURN
from tests.unit.evaluation.toys import Scripted


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("48/2", "24"),
        ("0.1 + 0.2", "0.3"),
        (" 1,200 * 3 ", "3600"),
        ("1,234,567-1", "1234566"),
        ("2**100", str(2**100)),
        ("(-8)**3", "-512"),
        ("+5 % 3", "2"),
        ("-7 % 3 - -7 // 2", "6"),
        ("2 - 3 * 4 ** 0.5 + 1.5e3", "1496"),
        ('"strawberry".count("r")', "3"),
        ('"1,234".count(",")', "1"),
        ("'a-b'.count('-') * 2", "2"),
    ],
)
def test_it_computes_what_a_model_needs(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        *["", "1 +", "1 2", "1,2", "007", "1\n2", "\0", "\ud800", "True", "None", "1j", "~1", "10**100"],
        *["__import__('os').system('true')", "open('/etc/passwd').read()", "(1).__class__.__mro__"],
        *["x", "(x := 1)", "(lambda: 1)()", "[1][0]", "sum([i for i in (1, 2)])", "f'{1}'.count('1')"],
        *["'a' * 10**9", "'a' + 'b'", "'a'", "'%s' % 1", "'a'.upper()", "'a'.count(1)", "'a'.count('a', 0)"],
        *["('a' * 10**9).count('a')", "'a'.count('a').count('a')", "9**9**9**9", "2**250", "2**(2**60)"],
        *["1<<10**9", "1e400", "1e300**2", "10.0**400", "(-8)**0.5", "1/0", "1 % 0", "0.0**-1", "1 < 2"],
        *["1 if 1 else 2", "not 1", "import os", "1; 2", "1" * 251, "9" * 240, "1+" * 200],
        *["(" * 33 + "1" + ")" * 33, "(" * 256, "[" * 256, "{1:" * 80, "f'{" * 80, "lambda:" * 36],
    ],
)
def test_what_is_not_arithmetic_is_refused_at_once(expression):
    started = time.thread_time()
    assert calculate(expression) is None
    assert time.thread_time() - started < 1


@given(st.text(alphabet="0123456789.,+-*/%() '\"acount[]{}:=_eExj\\\n", max_size=300))
def test_any_text_has_a_short_value_or_none(text):
    said = calculate(text)
    assert said is None or len(said) <= 80


def called(expression, output):
    return [PYTHON_START, *expression, PYTHON_END, OUTPUT_START, *output, OUTPUT_END]


def test_a_call_is_followed_by_its_output_which_the_model_reads():
    # What the model writes during an output is replaced.
    model = Scripted([*b"so ", PYTHON_START, *b"48/2", PYTHON_END, *b"xxxx", *b" it is 24", TURN])
    settings = {"max_bytes": 100, "temperature": 0, "seed": 0, "ends": [TURN]}
    written = list(generate(model, "q", **settings, calculator=True))
    expected = [*b"so ", *called(b"48/2", b"24"), *b" it is 24"]
    assert written == expected
    assert model.read[-1] == [BYTES.bos, *b"q", *expected]
    assert "".join(stream_text(written)) == "so ⟨48/2⟩⟨= 24⟩ it is 24"


def test_a_call_that_fails_has_no_output_and_the_text_goes_on():
    for script in (
        [PYTHON_START, *b"1/0", PYTHON_END, *b" none"],
        [PYTHON_END, *b"48/2", PYTHON_END],
        [PYTHON_START, *b"open('x')", PYTHON_END, PYTHON_START, *b"4", BYTES.eos],
    ):
        model = Scripted([*script, BYTES.eos])
        written = generate(model, "", max_bytes=100, temperature=0, seed=0, calculator=True)
        assert list(written) == [i for i in script if i != BYTES.eos]


def test_a_repeated_start_begins_the_call_again_and_outputs_may_follow_each_other():
    calls = Calls(BYTES)
    drawn = [PYTHON_START, *b"9", PYTHON_START, *b"1+1", PYTHON_END, *b"...", PYTHON_START, *b"2", PYTHON_END]
    begun = [PYTHON_START, *b"9", *called(b"1+1", b"2"), *called(b"2", b"")[:3]]
    assert [calls.next(i) for i in drawn] == begun
    assert [calls.next(0) for _ in range(4)] == [OUTPUT_START, *b"2", OUTPUT_END, 0]


def test_without_the_calculator_no_token_of_a_call_is_drawn():
    model = Scripted([PYTHON_START, *b"ab", OUTPUT_START, BYTES.eos])
    written = list(generate(model, "", max_bytes=3, temperature=0, seed=0))
    assert all(i < 256 for i in written) and written[1:] == [*b"ab"]
