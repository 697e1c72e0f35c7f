"""Settings of the n-gram index and of the head that reads it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from spider.config.block import Block, Positive, identity

#: Largest order, in bytes.
LONGEST_ORDER = 64
#: Largest number of orders.
MOST_ORDERS = 16
#: Largest number of words before the current one.
MOST_WORDS = 8

Orders = Annotated[list[Annotated[int, Field(ge=1, le=LONGEST_ORDER)]], Field(min_length=1)]


class NgramConfig(Block):
    """N-gram index of the dataset's n-gram split, match model of the document, and the head that scores the
    candidates of both (docs/ngram.md)."""

    orders: Orders = [1, 2, 3, 4, 5, 6, 7, 9, 12, 16, 22]
    """Lengths of the counted contexts, in bytes, ascending."""
    words: list[Annotated[int, Field(ge=0, le=MOST_WORDS)]] = []
    """Lengths of the counted contexts of words, ascending: the words before the current one (0: none)."""
    rare: Positive = 9
    """Lowest order whose contexts are left out if they occur once. The match model covers them."""
    match_orders: Orders = [2, 3, 4, 5, 6, 8, 11, 15, 20, 32]
    """Lengths of the contexts that the match model finds earlier in the document, in bytes, ascending."""
    candidates: Annotated[int, Field(ge=1, le=64)] = 16
    """Largest number of candidates for the next byte."""
    hidden: Positive = 48
    """Width of the head's features of a candidate."""
    state: Positive = 96
    """Width of the head's features of a position."""

    @field_validator("orders", "words", "match_orders")
    @classmethod
    def _rising(cls, orders: list[int]) -> list[int]:
        if orders != sorted(set(orders)):
            raise ValueError(f"must be ascending, without repetition (got {orders})")
        if len(orders) > MOST_ORDERS:
            raise ValueError(f"must have at most {MOST_ORDERS} orders (got {len(orders)})")
        return orders

    @property
    def contexts(self) -> list[int]:
        """Kinds of counted contexts (`spider.ngram.contexts`)."""
        return [*self.orders, *(~n for n in self.words)]

    @property
    def counted(self) -> str:
        """Digest of the settings that decide the tables."""
        return identity(self.changed(include={"orders", "rare", "words"}))
