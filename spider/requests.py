"""The bounds on what the jobs that count, merge and pack hold in memory, and what they request for it.

The first four constants bound the buffers of counting and merging, so the memory of these jobs does not grow
with the text. Packing holds a few numbers for each piece of a document. Running times grow with the text. All
figures are measured by ``benchmarks/ngram.py``; requests are larger than what was measured.

This module imports neither NumPy nor Numba, because Snakemake imports it for each job.
"""

from __future__ import annotations

from typing import NamedTuple

#: Symbols of a text that are counted at a time.
PIECE = 1 << 25
#: Pairs of key and count that are merged at a time.
SLICE = 1 << 22
#: Entries of ``last.npy`` that are filled at a time.
ENTRIES = 1 << 26
#: Runs that are merged at a time. Each is two open files.
FAN_IN = 64

#: MB of a process that has imported NumPy and Numba and compiled its loops.
_STARTED = 400
#: Bytes held for each symbol that is counted at a time: its text, hashes, contexts, keys and counts.
_COUNTED = 28
#: Bytes held for each pair that is merged at a time, by each thread.
_MERGED = 120
#: Bytes held for each entry of ``last.npy`` that is filled at a time, and for each symbol read for it.
_ENTRY, _READ = 4, 2
#: Bytes held for each piece of a document that is packed.
_PACKED = 64
#: Seconds for a symbol and a kind of contexts, to count and to merge, and for a packed piece. They are four
#: times what was measured, or more.
_SECONDS_COUNTED, _SECONDS_MERGED, _SECONDS_PACKED = 4e-7, 1e-7, 2e-5


class Request(NamedTuple):
    mem_mb: int
    minutes: int


def counting(symbols: float, kinds: int) -> Request:
    """Return the request of a job that counts a part of so many symbols."""
    held = _STARTED + _COUNTED * min(symbols, PIECE) / 1e6
    return Request(round(held), _minutes(_SECONDS_COUNTED * symbols * kinds))


def merging(symbols: float, kinds: int, threads: int) -> Request:
    """Return the request of a job that merges the counts of so many symbols."""
    tables = threads * _MERGED * min(2 * symbols, SLICE) / 1e6
    last = (_ENTRY * min(2 * symbols, ENTRIES) + _READ * min(symbols, PIECE)) / 1e6
    return Request(round(_STARTED + max(tables, last)), _minutes(_SECONDS_MERGED * symbols * kinds))


def packing(tokens: float, documents: float, seq_len: int) -> Request:
    """Return the request of a job that packs so many documents into rows of ``seq_len`` targets."""
    pieces = documents + tokens / seq_len
    return Request(round(_STARTED + _PACKED * pieces / 1e6), _minutes(_SECONDS_PACKED * pieces))


def _minutes(seconds: float) -> int:
    """Return a time limit in minutes: half an hour for starting and slow disks, and the work itself."""
    return 30 + round(seconds / 60)
