"""Settings of the n-gram index and of the head that reads it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from spider.config.block import Block, Positive, identity

#: Orders are at most so long, and so many.
LONGEST_ORDER, MOST_ORDERS = 64, 16
#: Words before the current one are at most so many.
MOST_WORDS = 8

Orders = Annotated[list[Annotated[int, Field(ge=1, le=LONGEST_ORDER)]], Field(min_length=1)]


class NgramConfig(Block):
    """Counts of the dataset's n-gram split, matches into the document, and a head that prices both."""

    orders: Orders = [1, 2, 3, 4, 5, 6, 7, 9, 12, 16, 22]
    """Lengths of the contexts that are counted, in bytes, rising."""
    words: list[Annotated[int, Field(ge=0, le=MOST_WORDS)]] = []
    """Numbers of words whose contexts are counted beside the current word's, rising: 0 is that word alone."""
    rare: Positive = 9
    """From this order on, contexts that occur once are not kept: a match in the text stands for them."""
    match_orders: Orders = [2, 3, 4, 5, 6, 8, 11, 15, 20, 32]
    """Lengths of the contexts whose earlier places in the document are looked at, rising."""
    candidates: Annotated[int, Field(ge=1, le=64)] = 16
    """Bytes that are proposed at a place, at most."""
    hidden: Positive = 48
    """Width of what the head knows of a candidate."""
    state: Positive = 96
    """Width of what it knows of a place."""

    @field_validator("orders", "words", "match_orders")
    @classmethod
    def _rising(cls, orders: list[int]) -> list[int]:
        if orders != sorted(set(orders)):
            raise ValueError(f"must rise, each once (got {orders})")
        if len(orders) > MOST_ORDERS:
            raise ValueError(f"must be {MOST_ORDERS} orders at most (got {len(orders)})")
        return orders

    @property
    def contexts(self) -> list[int]:
        """The kinds that are counted (`spider.ngram.contexts`)."""
        return [*self.orders, *(~n for n in self.words)]

    @property
    def counted(self) -> str:
        """Digest of what decides the tables."""
        return identity(self.changed(include={"orders", "rare", "words"}))
