"""The base class of all blocks of the configuration, their digests, and their error messages.

A digest contains the settings that *differ from the defaults*, and `FORMAT`. A new key at its default
therefore changes no digest, and finished work stays valid. A change of a *default* changes the meaning of an
unchanged configuration, so it must raise `FORMAT`, which changes every digest
(``tests/unit/config/test_identity.py`` checks this).
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
from collections.abc import Callable, Collection
from decimal import Decimal
from functools import cache
from itertools import pairwise
from textwrap import dedent
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from spider.common.files import digest
from spider.common.record import key_path

#: Version of all defaults together.
FORMAT = 1


class ConfigError(ValueError):
    """The configuration is wrong. The message has a line for each problem, with the path of its key."""


def nearest(name: str, known: Collection[str]) -> str:
    """Return a hint for a misspelt name: the nearest known name, or all of them."""
    close = difflib.get_close_matches(str(name), known, n=1)
    return f'; did you mean "{close[0]}"?' if close else f" (there are: {', '.join(sorted(known))})"


def none_such(kind: str, name: str, known: Collection[str]) -> str:
    """Return the message about a name that does not exist."""
    return f"no {kind} {name!r}{nearest(name, known)}"


def check_name(name: str) -> str:
    """Return a name. Raise `ConfigError` if it cannot be the name of a folder."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
        raise ConfigError(f"a name is letters, digits, - and _ (got {name!r})")
    return name


def must_be(wanted: str, holds: Callable[[Any], Any]) -> BeforeValidator:
    """Return a validator that refuses a value that is neither null nor such that ``holds`` is true."""

    def checked(value: Any) -> Any:
        if value is not None and not holds(value):
            raise ValueError(f"must be {wanted} (got {value!r})")
        return value

    return BeforeValidator(checked)


def is_count(value: Any, least: int = 1) -> bool:
    """Return whether a value is a whole number of at least ``least``."""
    return type(value) is int and value >= least


def matches(pattern: str) -> Callable[[Any], Any]:
    """Return a function that returns whether a text matches a pattern as a whole; no text passes."""
    return lambda value: not isinstance(value, str) or re.fullmatch(pattern, value)


Name = Annotated[str, AfterValidator(check_name)]
Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Block(BaseModel):
    """Base class of the blocks of the configuration. Unknown keys are refused, and blocks are immutable."""

    # A block that is part of another one is built with it, and not once more by itself.
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), defer_build=True)

    @model_validator(mode="wrap")
    @classmethod
    def _checked(cls, plain: Any, validate: Callable[[Any], Self]) -> Self:
        """Suggest a key for an unknown one, read ``6e5`` as an integer, and refuse bool as a number.

        In Python bool is a subclass of int, and YAML reads ``yes``, ``no``, ``on`` and ``off`` as bool.
        """
        if isinstance(plain, dict):
            plain = {
                key: _as_integer(value) if cls._number_type(key) == "int" else value
                for key, value in plain.items()
            }
        errors: list[Any] = [
            {"type": _message(f"must be a number (got {str(value).lower()})"), "loc": (key,), "input": value}
            for key, value in (plain.items() if isinstance(plain, dict) else ())
            if isinstance(value, bool) and cls._number_type(key)
        ]
        try:
            block = validate(plain)
        except ValidationError as error:
            reported = {one["loc"] for one in errors}
            errors += [one for one in error.errors() if one["loc"] not in reported]
        else:
            if not errors:
                return block
        for one in errors:
            if one["type"] == "extra_forbidden" and len(one["loc"]) == 1:
                one["type"] = _message(f"unknown key{nearest(one['loc'][0], cls.model_fields)}")
        raise ValidationError.from_exception_data("block", errors)

    @classmethod
    @cache
    def _number_type(cls, key: str) -> str:
        """Return "int" or "float" for a key that holds only such numbers, else ""."""
        field = cls.model_fields.get(key)
        kinds = set(re.findall(r"\w+", str(field.annotation))) if field else set()
        if kinds & {"bool", "Any"} or not kinds & {"int", "float"}:
            return ""
        return "float" if "float" in kinds else "int"

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON schema, in which the text below a key in the source describes the key."""
        schema = handler(core_schema)
        for one in cls.__mro__[: cls.__mro__.index(Block)]:
            [block] = ast.parse(dedent(inspect.getsource(one))).body
            assert isinstance(block, ast.ClassDef)
            for key, text in pairwise(block.body):
                if isinstance(key, ast.AnnAssign) and isinstance(text, ast.Expr):
                    described = handler.resolve_ref_schema(schema)["properties"][ast.unparse(key.target)]
                    described.setdefault("description", inspect.cleandoc(ast.literal_eval(text.value)))
        return schema

    def changed(self, **without: Any) -> dict[str, Any]:
        """Return the settings that differ from the defaults, as plain JSON.

        ``without`` is passed to pydantic, such as ``exclude={...}``.
        """
        return self.model_dump(mode="json", exclude_defaults=True, **without)


def _as_integer(value: Any) -> Any:
    """Return text such as ``6e5`` as an integer, also in a list. Return any other value unchanged.

    YAML 1.1 reads a number with an exponent as text unless it has a point and a sign, as in ``6.0e+5``.
    """
    if isinstance(value, list):
        return [_as_integer(one) for one in value]
    if isinstance(value, str) and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d{1,2}", value):
        number = Decimal(value)
        return int(number) if number == number.to_integral_value() else value
    return value


def identity(plain: Any) -> str:
    """Return the digest of what `Block.changed` returns for one or several blocks."""
    return digest({"format": FORMAT, "changed": plain})


# ----------------------------------------------------------------------------- messages of pydantic's errors

#: Messages by the type of the error, else by the first word of its type.
_PLAIN = {
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "missing": "is required",
    "int": "must be a whole number",
    "finite": "must be a finite number",
    "float": "must be a number",
    "string_type": "must be text",
    "bool": "must be true or false",
    "model": "must be a mapping",
    "dict": "must be a mapping",
    "list": "must be a list",
    "literal": "must be one of {expected}",
    "union_tag_invalid": "kind must be one of {expected_tags}",
    "union_tag_not_found": "needs a kind",
    "too_short": "must not be empty",
}


def _message(text: str) -> PydanticCustomError:
    return PydanticCustomError("value_error", "{error}", {"error": text})


def wrong_key(key: str, text: str) -> ValidationError:
    """Return the error about one key that a validator of its block raises."""
    problem = {"type": _message(text), "loc": (key,), "input": None}
    return ValidationError.from_exception_data("block", [problem])  # type: ignore[list-item]


def explain(error: Any) -> str:
    """Return one of pydantic's errors as a line."""

    where = key_path(error["loc"])
    kind = error["type"]
    context = error.get("ctx", {})
    if kind == "value_error":
        return f"{where}: {context['error']}"
    text = _PLAIN.get(kind) or _PLAIN.get(kind.partition("_")[0]) or error["msg"]
    text = "must be positive" if context.get("gt") == 0 else text.format(**context)
    got = error["input"]
    shown = "" if kind == "missing" or isinstance(got, (dict, list)) else f" (got {got!r})"
    return f"{where}: {text}{shown}"
