"""What every block of the configuration is, and what its digests are made of.

A digest holds what *differs from the defaults*, and `FORMAT`. So a new key changes no digest as long as it
stands at its default, and nothing that was finished before it is done again. The price: whoever changes a
*default* changes what an unchanged configuration means, and has to raise `FORMAT`, which changes every digest
(``tests/unit/config/test_identity.py`` insists).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from spider.config.explain import ConfigError, nearest, wrong_keys
from spider.files import digest

#: Of all defaults together; see above.
FORMAT = 1


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

    #: Keys that a digest of data holds even at their default, for those of before `FORMAT` do.
    RECORDED: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="wrap")
    @classmethod
    def _hint(cls, plain: Any, validate: Callable[[Any], Self]) -> Self:
        """Say of an unknown key which one is near, beside all else that is wrong."""
        try:
            return validate(plain)
        except ValidationError as error:
            others, unknown = [], {}
            for one in error.errors():
                if one["type"] == "extra_forbidden" and len(one["loc"]) == 1:
                    unknown[one["loc"][0]] = f"unknown key{nearest(str(one['loc'][0]), cls.model_fields)}"
                else:
                    others.append(one)
            raise (wrong_keys(unknown, others) if unknown else error) from None

    def changed(self, **without: Any) -> dict[str, Any]:
        """What differs from the defaults, as plain JSON; ``without`` is pydantic's ``exclude``."""
        return self.model_dump(mode="json", exclude_defaults=True, **without)

    def described(self) -> dict[str, Any]:
        """What differs from the defaults, and what is `RECORDED`: by that data is known. In the order of the
        schema, for Snakemake compares a param's text."""
        plain = self.changed() | self.model_dump(mode="json", include=set(self.RECORDED))
        return {name: plain[name] for name in type(self).model_fields if name in plain}


def identity(plain: Any) -> str:
    """Digest of what `Block.changed` says of one or several blocks."""
    return digest({"format": FORMAT, "changed": plain})
