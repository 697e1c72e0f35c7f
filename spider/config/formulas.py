"""Formulas over numbers, for settings that follow from others (``links`` of a run)."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from spider.config.block import ConfigError, nearest

_FUNCTIONS: dict[str, Callable[..., float]] = {
    "min": min,
    "max": max,
    "round": round,
    "floor": math.floor,
    "ceil": math.ceil,
    "sqrt": math.sqrt,
    "log": math.log,
    "exp": math.exp,
}
#: The operators of two numbers, which `spider.evaluation.calculator` has too.
BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def evaluate(formula: str, names: Mapping[str, float]) -> float:
    """Return the value of a formula such as ``max(2, round(hidden / 32))``.

    Args:
        names: the values that the formula may use, by name.

    Raises:
        ConfigError: the formula has another form, uses an unknown name, or has no value.
    """
    try:
        return _value(ast.parse(formula, mode="eval").body, names)
    except (SyntaxError, TypeError, ArithmeticError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{formula!r} has no value ({error})") from None


def _value(node: Any, names: Mapping[str, float]) -> float:
    match node:
        case ast.Constant(value=float() | int() as value):
            return value
        case ast.Name(id=name):
            if name not in names:
                raise ConfigError(f"uses {name!r}{nearest(name, names)}; it may use {', '.join(names)}")
            return names[name]
        case ast.BinOp(op=op, left=left, right=right) if type(op) in BINARY:
            result: float = BINARY[type(op)](_value(left, names), _value(right, names))
            return result
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, names)
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_value(one, names) for one in node.args))
    known = "numbers, names, + - * / // % **, and " + ", ".join(_FUNCTIONS)
    raise ConfigError(f"{ast.unparse(node)!r} is not a part of a formula; write {known}")
