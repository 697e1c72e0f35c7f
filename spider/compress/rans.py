"""Small integers to bytes and back, near their entropy: range asymmetric numeral systems (Duda,
arXiv:1311.2540), with integer tables, so that every machine reads what any other wrote.

A state x of 32 bits holds what is not yet written. With frequencies f that sum to M = 2^14 and their sums c
before each symbol ::

    write s:  while x >= f 2^18: put the low 16 bits of x out;   x <- (x div f) M + (x mod f) + c
    read:     s = the symbol with c <= x mod M < c + f;          x <- f (x div M) + (x mod M) - c
              if x < 2^16: take 16 bits in

so that what is written last is read first. Symbol i goes through state i mod L of L lanes, all of which take
a step at once; with a word of 16 bits at most one is put out a step. The states stand before the words.

Shapes: N symbols, of which one table each holds a run; S symbols of a table's alphabet, L lanes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Bits of the tables; of a state's lower bound, and of a word.
_TABLE, _WORD = 14, 16
TOTAL, _LOW = 1 << _TABLE, 1 << _WORD


def table(counts_S: np.ndarray) -> np.ndarray:
    """Frequencies (S,) uint16 that sum to `TOTAL`, near the counts' shares; what occurs has at least one."""
    counts_S = np.asarray(counts_S, np.int64)
    total = int(counts_S.sum())
    assert 0 < np.count_nonzero(counts_S) <= TOTAL and len(counts_S) <= TOTAL
    share_S = counts_S * (TOTAL / total)
    frequency_S = np.maximum(np.floor(share_S).astype(np.int64), counts_S > 0)
    while over := int(frequency_S.sum()) - TOTAL:
        # Give or take one where it costs least: bits change by count * log((f -+ 1) / f).
        with np.errstate(divide="ignore", invalid="ignore"):
            if over > 0:
                cost_S = np.where(frequency_S > 1, counts_S * -np.log1p(-1 / frequency_S), np.inf)
            else:
                cost_S = np.where(counts_S > 0, -counts_S * np.log1p(1 / frequency_S), np.inf)
        chosen = np.argsort(cost_S, kind="stable")[: min(abs(over), max(1, len(counts_S) // 8))]
        chosen = chosen[np.isfinite(cost_S[chosen])]
        frequency_S[chosen] -= 1 if over > 0 else -1
    return frequency_S.astype(np.uint16)


def bits(counts_S: np.ndarray) -> float:
    """The entropy of so many symbols, of all of them together."""
    n = np.asarray(counts_S, np.float64)
    n = n[n > 0]
    return float(-(n * np.log2(n / n.sum())).sum())


def lanes_for(symbols: int) -> int:
    """More lanes are quicker, and each costs four bytes: one for 4,096 symbols, 1,024 at most."""
    return int(min(1024, max(1, symbols >> 12)))


def encode(runs: Sequence[np.ndarray], tables: Sequence[np.ndarray], lanes: int) -> bytes:
    """The bytes of runs of symbols (uint8), each by its table; what occurs has a frequency there."""
    base_T, frequency_A, before_A = _joined(tables)
    at_N = np.concatenate([base + run.astype(np.int32) for base, run in zip(base_T, runs, strict=True)])
    state_L = np.full(lanes, _LOW, np.uint64)
    words: list[np.ndarray] = []
    for start in range((len(at_N) - 1) // lanes * lanes, -1, -lanes):
        at = at_N[start : start + lanes]
        f, x = frequency_A[at], state_L[: len(at)]
        full = x >= f << np.uint64(32 - _TABLE)
        words.append(x[full].astype(np.uint16))
        x = np.where(full, x >> np.uint64(_WORD), x)
        whole, rest = np.divmod(x, f)
        state_L[: len(at)] = (whole << np.uint64(_TABLE)) + rest + before_A[at]
    stream = np.concatenate([np.zeros(0, np.uint16), *reversed(words)])
    return state_L.astype("<u4").tobytes() + stream.astype("<u2").tobytes()


def decode(data: bytes, sizes: Sequence[int], tables: Sequence[np.ndarray], lanes: int) -> list[np.ndarray]:
    """The runs (uint8), of so many symbols each. `ValueError` where the bytes are no such runs."""
    if len(data) < 4 * lanes or len(data) % 2:
        raise ValueError(f"{len(data):,} bytes are too few for {lanes} lanes, or not whole words")
    base_T, frequency_A, before_A = _joined(tables)
    symbol_TM = np.stack([np.repeat(np.arange(len(one), dtype=np.uint8), one) for one in tables])
    table_N = np.repeat(np.arange(len(tables), dtype=np.int32), sizes)
    state_L = np.frombuffer(data, "<u4", lanes).astype(np.uint64)
    word_W = np.frombuffer(data, "<u2", offset=4 * lanes).astype(np.uint64)
    found_N, taken, mask = np.empty(len(table_N), np.uint8), 0, np.uint64(TOTAL - 1)
    for start in range(0, len(table_N), lanes):
        which = table_N[start : start + lanes]
        x = state_L[: len(which)]
        low = x & mask
        found_N[start : start + lanes] = symbol = symbol_TM[which, low]
        at = base_T[which] + symbol
        x = frequency_A[at] * (x >> np.uint64(_TABLE)) + low - before_A[at]
        empty = np.flatnonzero(x < _LOW)
        new = word_W[taken : taken + len(empty)]
        if len(new) < len(empty):
            raise ValueError("the stream ends too soon")
        x[empty] = (x[empty] << np.uint64(_WORD)) | new
        taken += len(new)
        state_L[: len(which)] = x
    if taken < len(word_W) or (state_L != _LOW).any():
        raise ValueError("the stream does not end where its symbols do")
    return np.split(found_N, np.cumsum(sizes)[:-1])


def _joined(tables: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where each table begins in all of them, (T,), their frequencies, and the sums before each. `ValueError`
    of one that does not sum to `TOTAL`."""
    for number, one in enumerate(tables):
        if (total := int(one.sum(dtype=np.int64))) != TOTAL:
            raise ValueError(f"table {number} sums to {total:,}, not to {TOTAL:,}")
    base_T = np.cumsum([0, *(len(one) for one in tables)])[:-1].astype(np.int32)
    before = [np.cumsum(one, dtype=np.int64) - one for one in tables]
    return base_T, np.concatenate(tables).astype(np.uint64), np.concatenate(before).astype(np.uint64)
