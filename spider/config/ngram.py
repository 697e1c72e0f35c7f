"""Settings of the n-gram index and of the head that reads it."""

from __future__ import annotations

import re
from functools import cache
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, field_validator

from spider.config.block import Block, Positive, identity

#: Largest order, in bytes.
LONGEST_ORDER = 64
#: Largest number of kinds of contexts in a list.
MOST_KINDS = 24
#: Largest number of words before the current one.
MOST_WORDS = 8
#: Number of the first context of the layout of a text; smaller than all others.
FIRST_STRUCTURE = ~MOST_WORDS - 1
#: Contexts of the layout of a text, by name.
STRUCTURES = ("column", "indent", "above")


@cache
def kind_of(name: int | str) -> int:
    """Return the number of a kind of context (`spider.data.ngram.contexts`), given its name.

    Raises:
        ValueError: The name is not one of a kind.
    """
    name = str(name)
    if name in STRUCTURES:
        return FIRST_STRUCTURE - STRUCTURES.index(name)
    if name.isdecimal() and 1 <= int(name) <= LONGEST_ORDER:
        return int(name)
    if (words := re.fullmatch(r"words(\d)", name)) and int(words[1]) <= MOST_WORDS:
        return ~int(words[1])
    raise ValueError(
        f"{name} is not a kind of context; there are orders (1 to {LONGEST_ORDER}), words0 to "
        f"words{MOST_WORDS}, {', '.join(STRUCTURES)}"
    )


def name_of(kind: int) -> str:
    """Return the name of a kind of context, as in the configuration: ``12``, ``words2``, ``above``."""
    if kind > 0:
        return str(kind)
    if kind >= ~MOST_WORDS:
        return f"words{~kind}"
    return STRUCTURES[FIRST_STRUCTURE - kind]


def _checked(name: int | str) -> int | str:
    kind_of(name)
    return name


Kinds = Annotated[list[Annotated[int | str, AfterValidator(_checked)]], Field(min_length=1)]


class NgramConfig(Block):
    """N-gram index of the dataset's n-gram split, match model of the document, and the head that scores the
    candidates of both (docs/ngram.md)."""

    #: Share of the training windows that look back, if ``carry_over`` is not 0.
    CARRY_SHARE: ClassVar[float] = 0.25

    contexts: Kinds = [1, 2, 3, 4, 5, 6, 7, 9, 12, 16, 22]
    """Contexts whose successors are counted in the index: orders, and kinds that docs/ngram.md lists. The
    candidates of later ones come first."""
    rare: Positive = 9
    """Lowest order whose contexts are left out if they occur once. The match model covers them."""
    matches: Kinds = [2, 3, 4, 5, 6, 8, 11, 15, 20, 32]
    """Contexts that are found earlier in the document, of the same kinds. The candidates of later ones come
    first."""
    counts: list[Annotated[int, Field(ge=1, le=LONGEST_ORDER)]] = []
    """Orders whose successors are counted within the document."""
    carry_over: Annotated[int, Field(ge=0)] = 0
    """Bytes of earlier training documents that matches look back on in training (0: the document alone)."""
    hidden: Positive = 48
    """Width of the head's features of a candidate."""
    state: Positive = 96
    """Width of the head's features of a position."""

    @field_validator("contexts", "matches", "counts")
    @classmethod
    def _distinct(cls, names: list[int | str]) -> list[int | str]:
        if len(set(map(str, names))) < len(names):
            raise ValueError(f"must not repeat a kind (got {names})")
        if len(names) > MOST_KINDS:
            raise ValueError(f"must have at most {MOST_KINDS} kinds (got {len(names)})")
        return names

    @property
    def context_kinds(self) -> list[int]:
        """Kinds of the counted contexts."""
        return list(map(kind_of, self.contexts))

    @property
    def match_kinds(self) -> list[int]:
        """Kinds of the contexts that are found in the document."""
        return list(map(kind_of, self.matches))

    def counting(self) -> dict[str, Any]:
        """Return the changed settings that decide the tables."""
        return self.changed(include={"contexts", "rare"})

    @property
    def counted(self) -> str:
        """Digest of the settings that decide the tables."""
        return identity(self.counting())
