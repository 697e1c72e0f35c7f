"""What every block of the configuration is, what its digests are made of, and how it is said what is wrong.

A digest holds what *differs from the defaults*, and `FORMAT`. So a new key changes no digest as long as it
stands at its default, and nothing that was finished before it is done again. The price: whoever changes a
*default* changes what an unchanged configuration means, and has to raise `FORMAT`, which changes every digest
(``tests/unit/config/test_identity.py`` insists).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection
from decimal import Decimal
from functools import cache
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from spider.files import digest
from spider.record import key_path

#: Of all defaults together; see above.
FORMAT = 1


class ConfigError(ValueError):
    """What is wrong in the configuration, one problem a line, each with the path of its key."""


def nearest(name: str, known: Collection[str]) -> str:
    """A hint for a misspelt name, or the names there are."""
    close = difflib.get_close_matches(str(name), known, n=1)
    return f'; did you mean "{close[0]}"?' if close else f" (there are: {', '.join(sorted(known))})"


def none_such(kind: str, name: str, known: Collection[str]) -> str:
    return f"no {kind} {name!r}{nearest(name, known)}"


def check_name(name: str) -> str:
    """A name as it is, if it can be that of a folder."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
        raise ConfigError(f"a name is letters, digits, - and _ (got {name!r})")
    return name


Name = Annotated[str, AfterValidator(check_name)]
Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Block(BaseModel):
    """A block of the configuration: unknown keys are refused, values are frozen once validated."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True
    )

    @model_validator(mode="wrap")
    @classmethod
    def _checked(cls, plain: Any, validate: Callable[[Any], Self]) -> Self:
        """Name the key that an unknown key is near to, and read ``6e5`` as a whole number.

        A number must not be true or false. To Python these are 1 and 0, and YAML reads ``yes``, ``no``,
        ``on`` and ``off`` as them.
        """
        if isinstance(plain, dict):
            plain = {key: _whole(value) if cls._kind(key) == "int" else value for key, value in plain.items()}
        wrong: list[Any] = [
            {"type": _said(f"must be a number (got {str(value).lower()})"), "loc": (key,), "input": value}
            for key, value in (plain.items() if isinstance(plain, dict) else ())
            if isinstance(value, bool) and cls._kind(key)
        ]
        try:
            block = validate(plain)
        except ValidationError as error:
            said = {one["loc"] for one in wrong}
            wrong += [one for one in error.errors() if one["loc"] not in said]
        else:
            if not wrong:
                return block
        for one in wrong:
            if one["type"] == "extra_forbidden" and len(one["loc"]) == 1:
                one["type"] = _said(f"unknown key{nearest(one['loc'][0], cls.model_fields)}")
        raise ValidationError.from_exception_data("block", wrong)

    @classmethod
    @cache
    def _kind(cls, key: str) -> str:
        """Return "int" or "float" for a key that holds such numbers alone, else ""."""
        field = cls.model_fields.get(key)
        kinds = set(re.findall(r"\w+", str(field.annotation))) if field else set()
        if kinds & {"bool", "Any"} or not kinds & {"int", "float"}:
            return ""
        return "float" if "float" in kinds else "int"

    def changed(self, **without: Any) -> dict[str, Any]:
        """What differs from the defaults, as plain JSON; ``without`` is pydantic's ``exclude``."""
        return self.model_dump(mode="json", exclude_defaults=True, **without)


def _whole(value: Any) -> Any:
    """Return the whole number that text such as ``6e5`` stands for, also in a list; any other value as it is.

    YAML 1.1 reads a number with an exponent as text unless it has a point and a sign, as in ``6.0e+5``.
    """
    if isinstance(value, list):
        return [_whole(one) for one in value]
    if isinstance(value, str) and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d{1,2}", value):
        number = Decimal(value)
        return int(number) if number == number.to_integral_value() else value
    return value


def identity(plain: Any) -> str:
    """Digest of what `Block.changed` says of one or several blocks."""
    return digest({"format": FORMAT, "changed": plain})


# ------------------------------------------------------------------------ pydantic's errors in words

#: By the kind of error, else by its first word.
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


def _said(text: str) -> PydanticCustomError:
    return PydanticCustomError("value_error", "{error}", {"error": text})


def wrong_key(key: str, text: str) -> ValidationError:
    """For a block's validator to raise, where it knows which of its keys is wrong."""
    return ValidationError.from_exception_data("block", [{"type": _said(text), "loc": (key,), "input": None}])


def explain(error: Any) -> str:
    """One of pydantic's errors as a line."""
    where, kind, ctx = key_path(error["loc"]), error["type"], error.get("ctx", {})
    if kind == "value_error":
        return f"{where}: {ctx['error']}"
    text = _PLAIN.get(kind) or _PLAIN.get(kind.partition("_")[0]) or error["msg"]
    text = "must be positive" if ctx.get("gt") == 0 else text.format(**ctx)
    got = error["input"]
    shown = "" if kind == "missing" or isinstance(got, (dict, list)) else f" (got {got!r})"
    return f"{where}: {text}{shown}"
