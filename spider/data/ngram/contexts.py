"""Contexts: hashes of the symbols before a position.

A context of *order* o is the o symbols before a position. The beginning of the document counts as one of
them, and a context does not reach beyond it.

A context of n *words* ignores line breaks and commas, which end the contexts of an order. A word consists of
letters, digits, underscores and all bytes beyond ASCII. The *current* word is the one that began last, with
the symbols since its end. Letters are compared without case, and whitespace as one blank. The context is the
current word so far and the n words before it, if there are that many. A word that is longer than
`MAX_WORD`, with the symbols after it, ends all contexts. So a context depends on the `reach` symbols before a
position.

Contexts of the *structure* are of the layout in lines. ``column`` is the number of symbols since the line's
begin, the symbol above the next one, and the last symbol. ``indent`` is the number of blanks at the line's
begin, the first symbol that is not blank, and the last two. ``above`` is the two symbols above the next ones,
and the last two. Only the first `MAX_LINE` symbols of a line have these contexts, and a longer line counts as
empty for the next one.

A kind of context is a number (`spider.config.model.kind_of`): o, ``~n``, or a smaller one. Hashes have 56
bits, the high ones of 64, so a key has a byte left for the symbol that follows. A position without a context
has the hash 0.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numba import njit

from spider.config.model import FIRST_STRUCTURE, MOST_WORDS, STRUCTURES
from spider.data.ngram.layout import BEGIN, END

#: Decorator of a loop over symbols: it runs without the interpreter's lock and is cached on disk.
compiled: Any = partial(njit, nogil=True, cache=True, no_cfunc_wrapper=True)
#: The same for a function that only compiled functions call, which needs no wrapper for Python.
inner: Any = partial(compiled, no_cpython_wrapper=True)

#: Symbols of the longest current word.
MAX_WORD = 32
#: Symbols of the longest line that has contexts of its structure.
MAX_LINE = 1 << 8
_BREAK, _BLANK = ord("\n"), ord(" ")
_INDENT = STRUCTURES.index("indent")
_COLUMN = STRUCTURES.index("column")


def _normalized() -> np.ndarray:
    table = np.arange(1 + END, dtype=np.uint8)
    table[ord("A") : ord("Z") + 1] += ord("a") - ord("A")
    table[[ord(c) for c in "\t\n\r"]] = ord(" ")
    return table


#: The symbol that each symbol is compared as, and whether it belongs to a word.
_NORMALIZED = _normalized()
_OF_WORD = np.array([chr(s).isalnum() or s == ord("_") if s < 128 else s < BEGIN for s in range(1 + END)])
_NONE, _ONE = np.uint64(0), np.uint64(1)
_BASE = np.uint64(0x9E3779B97F4A7C15)


@compiled(inline="always")
def appended(hash_: np.uint64, value: np.uint64) -> np.uint64:
    """Return the polynomial hash of a sequence and one more value."""
    return hash_ * _BASE + np.uint64(value) + _ONE


@compiled
def extend_hashes(text: np.ndarray, hashes: np.ndarray, lo: int, hi: int) -> None:
    """Extend the hashes of a text's prefixes from its first ``lo`` symbols to its first ``hi``."""
    for i in range(lo, hi):
        hashes[i + 1] = appended(hashes[i], text[i])


def prefix_hashes(text: np.ndarray) -> np.ndarray:
    """Return the polynomial hashes of all prefixes of N symbols: (N + 1,) uint64.

    The hash of any stretch of the text then costs one subtraction (`mixed`).
    """
    hashes = np.zeros(len(text) + 1, np.uint64)
    extend_hashes(text, hashes, 0, len(text))
    return hashes


@compiled
def power(order: int) -> np.uint64:
    """Return the factor of a prefix's hash when the prefix grows by this many symbols."""
    result = _ONE
    for _ in range(order):
        result *= _BASE
    return result


@compiled(inline="always")
def finalized(x: np.uint64) -> np.uint64:
    """Return a value after the finalizer of splitmix64 (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@compiled(inline="always")
def mixed(before: np.uint64, now: np.uint64, factor: np.uint64) -> np.uint64:
    """Return the hash of the symbols between two prefixes, `finalized`."""
    return finalized(now - before * factor)


@compiled
def of_order(text: np.ndarray, hashes: np.ndarray, order: int, lo: int, hi: int) -> np.ndarray:
    """Return the contexts of one order at the positions ``lo`` to ``hi`` of a text: (hi - lo,) uint64.

    ``hashes`` are the hashes of all its prefixes. Its first symbol may lie inside a document.
    """
    contexts = np.zeros(hi - lo, np.uint64)
    factor = power(order)
    begin = 0
    for i in range(max(0, lo - order), hi):
        if i >= lo and i - begin >= order:
            contexts[i - lo] = mixed(hashes[i - order], hashes[i], factor) | _ONE
        if i < len(text) and text[i] == BEGIN:
            begin = i
    return contexts


@compiled
def reach(kind: int) -> int:
    """Return the number of symbols before a position that decide its context of a kind.

    For words they include two more words, because the first one may be truncated.
    """
    if kind > 0:
        return kind
    if kind >= ~MOST_WORDS:
        return (~kind + 2) * (MAX_WORD + 1)
    return 2 * (MAX_LINE + 1)


@compiled
def of_words(text: np.ndarray, words: int, lo: int, hi: int) -> np.ndarray:
    """Return the contexts of this many words at the positions ``lo`` to ``hi`` of a text: (hi - lo,) uint64.

    Its first symbol may lie inside a document if ``lo`` is at least `reach`.
    """
    contexts = np.zeros(hi - lo, np.uint64)
    before = np.zeros(words + 1, np.uint64)
    known = 0
    length = MAX_WORD + 1  # the first symbols may be the rest of a long word
    inside = True
    blank = False
    word = current = _NONE
    for i in range(max(0, lo - reach(~words)), hi - 1):
        symbol = text[i]
        if symbol == BEGIN:
            known = 0
            length = 0
            inside = False
        elif _OF_WORD[symbol]:
            if not inside:
                if length > MAX_WORD:
                    known = 0
                elif length > 0:
                    for k in range(words, 0, -1):
                        before[k] = before[k - 1]
                    before[0] = word
                    known += 1
                current = _NONE
                length = 0
                inside = True
                blank = False
            word = current = appended(current, _NORMALIZED[symbol])
            length += 1
        elif length > 0:
            space = _NORMALIZED[symbol] == 32
            if not (space and blank):
                current = appended(current, _NORMALIZED[symbol])
            inside = False
            blank = space
            length += 1
        if i + 1 >= lo and known >= words and 0 < length <= MAX_WORD:
            combined = current
            for k in range(words):
                # Words are mixed first, because sums of polynomials do not depend on their order.
                combined = appended(combined, mixed(_NONE, before[k], _ONE))
            contexts[i + 1 - lo] = mixed(_NONE, combined, _ONE) | _ONE
    return contexts


@compiled
def of_structure(text: np.ndarray, structure: int, lo: int, hi: int) -> np.ndarray:
    """Return the contexts of a structure at the positions ``lo`` to ``hi`` of a text: (hi - lo,) uint64.

    Its first symbol may lie inside a document if ``lo`` is at least `reach`.
    """
    contexts = np.zeros(hi - lo, np.uint64)
    begin = max(0, lo - 2 * (MAX_LINE + 1))
    line = 0 if begin == 0 else -1  # the first symbol of the line; -1: unknown
    before = -1  # the first symbol of the line above; -1: none
    indent = 0
    first = _BREAK
    for i in range(begin, hi):
        if i >= lo and line >= 0 and i - line <= MAX_LINE:
            column = i - line
            above = beyond = _BREAK
            if before >= 0 and line - before <= MAX_LINE and before + column < line:
                above = text[before + column]
                beyond = text[min(before + column + 1, line - 1)]
            last = text[i - 1] if i > 0 else _BREAK
            second = text[i - 2] if i > 1 and last != BEGIN else _BREAK
            context = appended(_NONE, last)
            if structure == _COLUMN:
                context = appended(appended(context, column), above)
            elif structure == _INDENT:
                context = appended(appended(appended(context, second), indent), first)
            else:
                context = appended(appended(appended(context, second), above), beyond)
            contexts[i - lo] = mixed(_NONE, context, _ONE) | _ONE
        if i == hi - 1:
            break
        symbol = text[i]
        if symbol in (BEGIN, _BREAK):
            before = -1 if symbol == BEGIN else line
            line = i + 1
            indent = 0
            first = _BREAK
        elif first == _BREAK:
            if symbol == _BLANK:
                indent += 1
            else:
                first = symbol
    return contexts


@compiled
def contexts_of(text: np.ndarray, hashes: np.ndarray, kind: int, lo: int, hi: int) -> np.ndarray:
    """Return the contexts of a kind at the positions ``lo`` to ``hi`` of a text: (hi - lo,) uint64."""
    if kind > 0:
        return of_order(text, hashes, kind, lo, hi)
    if kind >= ~MOST_WORDS:
        return of_words(text, ~kind, lo, hi)
    return of_structure(text, FIRST_STRUCTURE - kind, lo, hi)
