"""Compute the expressions that a model writes between PYTHON_START and PYTHON_END (`spider.tokens.turns`).

The expression is parsed and its tree is computed here, node by node. Nothing is evaluated by Python, so no
expression can name a function, a variable or an attribute other than ``count`` of a text. Every value is
bounded before the next one is computed, so an expression takes less than a few milliseconds.
"""

from __future__ import annotations

import ast
import math
import operator
import re
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

from spider.tokens import Tokens
from spider.tokens.turns import OUTPUT_END, OUTPUT_START, PYTHON_END, PYTHON_START

#: Characters of the longest expression, its most parentheses, and the binary digits of the largest integer.
MOST_CHARACTERS, MOST_PARENTHESES, MOST_BITS = 250, 32, 250
#: Significant digits of a result that is not an integer: 0.1 + 0.2 is 0.3.
DIGITS = 12

#: The operators of two numbers.
BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def calculate(expression: str) -> str | None:
    """Return the value of an expression as text; None if it is malformed, not allowed or too large.

    Allowed are numbers (``1,200`` is 1200), ``+ - * / // % **``, parentheses and ``"text".count("t")``.
    """
    if len(expression) > MOST_CHARACTERS or expression.count("(") > MOST_PARENTHESES:
        return None
    if not {'"', "'"} & {*expression}:
        expression = _THOUSANDS.sub("", expression)
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(expression.strip(), mode="eval")
        value = _value(tree.body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None
    return str(value) if isinstance(value, int) else f"{value:.{DIGITS}g}"


def _value(node: ast.expr) -> int | float:
    """Return the value of a node; raise `ValueError` for one that is not allowed, or a value out of range."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            pass
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as op, operand=operand):
            value = -_value(operand) if isinstance(op, ast.USub) else _value(operand)
        case ast.BinOp(op=op, left=left, right=right) if type(op) in BINARY:
            one, two = _value(left), _value(right)
            bits = (abs(one).bit_length() - 1) * two if isinstance(one, int) and isinstance(two, int) else 0
            if isinstance(op, ast.Pow) and bits > MOST_BITS:  # the result has more bits than these
                raise ValueError("too large")
            value = BINARY[type(op)](one, two)
        case ast.Call(
            func=ast.Attribute(value=ast.Constant(value=str() as text), attr="count"),
            args=[ast.Constant(value=str() as part)],
            keywords=[],
        ):
            value = text.count(part)
        case _:
            raise ValueError("not an expression of numbers")
    if isinstance(value, complex):
        raise ValueError("not a real number")
    if value.bit_length() > MOST_BITS if isinstance(value, int) else not math.isfinite(value):
        raise ValueError("too large")
    return value


class Calls:
    """The calls in one stream of ids, and the ids that are written for the model after each of them.

    If `calculate` refuses a call, no output is written, and the model continues.
    """

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._call: list[int] | None = None
        self._output: deque[int] = deque()

    def next(self, drawn: int) -> int:
        """Return the next id of the stream: one of the output, if one is due, else the drawn id."""
        if self._output:
            return self._output.popleft()
        if drawn == PYTHON_START:
            self._call = []
        elif self._call is not None and drawn != PYTHON_END:
            self._call.append(drawn)
        elif self._call is not None:
            result = calculate(self._tokens.decode(self._call))
            self._call = None
            if result is not None:
                self._output.extend([OUTPUT_START, *self._tokens.encode(result)[1:-1].tolist(), OUTPUT_END])
        return drawn
