"""Entropy-code small integers by range asymmetric numeral systems (Duda, arXiv:1311.2540).

All tables are integers, so every machine reads the bytes that another machine wrote.

A state x of 32 bits holds what is not yet written. With frequencies f that sum to M = 2^14, and their sums c
before each symbol ::

    write s:  while x >= f 2^18: put the low 16 bits of x out;   x <- (x div f) M + (x mod f) + c
    read:     s = the symbol with c <= x mod M < c + f;          x <- f (x div M) + (x mod M) - c
              if x < 2^16: take 16 bits in

The symbol that is written last is read first. Symbol i uses state i mod L of L lanes, which all advance
together; with words of 16 bits a lane puts out at most one word per step. The states precede the words.

Shapes: N symbols, in runs that each have a table; S symbols of a table; T tables; L lanes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Bits of a table's total; bits of a word, which is also the lower bound of a state.
_TABLE_BITS, _WORD_BITS = 14, 16
TOTAL = 1 << _TABLE_BITS
_LOW = 1 << _WORD_BITS


def table(counts_S: np.ndarray) -> np.ndarray:
    """Return frequencies (S,) uint16 that sum to `TOTAL`, close to the shares of the counts.

    A symbol that occurs has a frequency of at least 1.
    """
    counts_S = np.asarray(counts_S, np.int64)
    total = int(counts_S.sum())
    assert 0 < np.count_nonzero(counts_S) <= TOTAL and len(counts_S) <= TOTAL
    share_S = counts_S * (TOTAL / total)
    frequency_S = np.maximum(np.floor(share_S).astype(np.int64), counts_S > 0)
    while over := int(frequency_S.sum()) - TOTAL:
        # Change those frequencies by 1 where it costs least: bits change by count * log((f -+ 1) / f).
        with np.errstate(divide="ignore", invalid="ignore"):
            if over > 0:
                cost_S = np.where(frequency_S > 1, counts_S * -np.log1p(-1 / frequency_S), np.inf)
            else:
                cost_S = np.where(counts_S > 0, -counts_S * np.log1p(1 / frequency_S), np.inf)
        chosen = np.argsort(cost_S, kind="stable")[: min(abs(over), max(1, len(counts_S) // 8))]
        chosen = chosen[np.isfinite(cost_S[chosen])]
        frequency_S[chosen] -= 1 if over > 0 else -1
    return frequency_S.astype(np.uint16)


def entropy_bits(counts_S: np.ndarray) -> float:
    """Return the entropy of all counted symbols together, in bits."""
    n = np.asarray(counts_S, np.float64)
    n = n[n > 0]
    return float(-(n * np.log2(n / n.sum())).sum())


def lanes_for(symbols: int) -> int:
    """Return the number of lanes: one per 4,096 symbols, at most 1,024.

    More lanes are faster, but each costs four bytes.
    """
    return int(min(1024, max(1, symbols >> 12)))


def encode(runs: Sequence[np.ndarray], tables: Sequence[np.ndarray], lanes: int) -> bytes:
    """Encode runs of symbols (uint8), each by its table, which must hold every symbol that occurs."""
    base_T, frequency_A, before_A = _concatenated(tables)
    at_N = np.concatenate([base + run.astype(np.int32) for base, run in zip(base_T, runs, strict=True)])
    state_L = np.full(lanes, _LOW, np.uint64)
    words: list[np.ndarray] = []
    for start in range((len(at_N) - 1) // lanes * lanes, -1, -lanes):
        at = at_N[start : start + lanes]
        f = frequency_A[at]
        x = state_L[: len(at)]
        full = x >= f << np.uint64(32 - _TABLE_BITS)
        words.append(x[full].astype(np.uint16))
        x = np.where(full, x >> np.uint64(_WORD_BITS), x)
        quotient, remainder = np.divmod(x, f)
        state_L[: len(at)] = (quotient << np.uint64(_TABLE_BITS)) + remainder + before_A[at]
    stream = np.concatenate([np.zeros(0, np.uint16), *reversed(words)])
    return state_L.astype("<u4").tobytes() + stream.astype("<u2").tobytes()


def decode(data: bytes, sizes: Sequence[int], tables: Sequence[np.ndarray], lanes: int) -> list[np.ndarray]:
    """Return the runs (uint8), which have ``sizes`` symbols; `ValueError` if the bytes do not hold them."""
    if len(data) < 4 * lanes or len(data) % 2:
        raise ValueError(f"{len(data):,} bytes are too few for {lanes} lanes, or not whole words")
    base_T, frequency_A, before_A = _concatenated(tables)
    symbol_TM = np.stack([np.repeat(np.arange(len(f_S), dtype=np.uint8), f_S) for f_S in tables])
    table_N = np.repeat(np.arange(len(tables), dtype=np.int32), sizes)
    state_L = np.frombuffer(data, "<u4", lanes).astype(np.uint64)
    word_W = np.frombuffer(data, "<u2", offset=4 * lanes).astype(np.uint64)
    symbol_N = np.empty(len(table_N), np.uint8)
    mask = np.uint64(TOTAL - 1)
    taken = 0
    for start in range(0, len(table_N), lanes):
        which = table_N[start : start + lanes]
        x = state_L[: len(which)]
        low = x & mask
        symbol = symbol_TM[which, low]
        symbol_N[start : start + lanes] = symbol
        at = base_T[which] + symbol
        x = frequency_A[at] * (x >> np.uint64(_TABLE_BITS)) + low - before_A[at]
        empty = np.flatnonzero(x < _LOW)
        new = word_W[taken : taken + len(empty)]
        if len(new) < len(empty):
            raise ValueError("the stream ends too soon")
        x[empty] = (x[empty] << np.uint64(_WORD_BITS)) | new
        taken += len(new)
        state_L[: len(which)] = x
    if taken < len(word_W) or (state_L != _LOW).any():
        raise ValueError("the stream does not end where its symbols do")
    return np.split(symbol_N, np.cumsum(sizes)[:-1])


def _concatenated(tables: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return where each table begins among all entries (T,), all frequencies, and the sums before each.

    Raises `ValueError` if a table does not sum to `TOTAL`.
    """
    for number, frequency_S in enumerate(tables):
        total = int(frequency_S.sum(dtype=np.int64))
        if total != TOTAL:
            raise ValueError(f"table {number} sums to {total:,}, not to {TOTAL:,}")
    base_T = np.cumsum([0, *map(len, tables)])[:-1].astype(np.int32)
    before = [np.cumsum(f_S, dtype=np.int64) - f_S for f_S in tables]
    return base_T, np.concatenate(tables).astype(np.uint64), np.concatenate(before).astype(np.uint64)
