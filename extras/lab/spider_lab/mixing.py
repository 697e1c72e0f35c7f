"""The arithmetic of the online mixer, compiled (`spider_lab.mixer` describes it).

Shape suffixes: S scored bytes, B 256 bytes, C contexts, I inputs, K sets of weights.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from spider.data.ngram.contexts import appended, compiled, inner, mixed

#: Values of a byte, which are the first ids of a vocabulary of bytes.
BYTE_VALUES = 256
#: Scored bytes between two sums over the whole tree. A sum costs as much as the learning from 30 bytes.
CHECK_EVERY = 256
CONTEXTS = 10
_INPUTS = CONTEXTS + 2
_SETS = 3
#: Rows of the table of counters. A row has a check and the counters of 15 nodes, half a byte.
_ROWS = 1 << 22
#: Observations after which an adaptive probability changes at a constant rate.
_LIMIT = 127
#: Largest absolute value of an input, and intervals of an adaptive probability map.
_MOST = 12.0
_STEPS = 32
_MAP_RATE = 0.02
#: Weight of a counter at first; that of the model is 1.
_WEIGHT = 0.05
#: Length of the shortest match. Longer matches than the second number share an adaptive probability.
_MATCH, _LONGEST = 6, 63
_HEADS = 1 << 18
#: Indices of `State.places`: the bytes read, the rows claimed, the beginnings of the document, of the line
#: and of the line above (-1: none). The last two are the byte that the match expects, and the match's length
#: (0: no match).
SIZE, CLAIMED, BEGIN, LINE, ABOVE, EXPECTED, LENGTH = range(7)
#: Indices of `State.recent`: the last eight bytes, and hashes of the current word and the two before it.
_LAST, _WORD, _WORD_1, _WORD_2 = range(4)
_NONE, _ONE, _EIGHT = np.uint64(0), np.uint64(1), np.uint64(8)
_OF_WORD = np.array([chr(byte).isalnum() or byte == ord("_") or byte > 127 for byte in range(256)])
_LOWER = np.array([byte + 32 * (ord("A") <= byte <= ord("Z")) for byte in range(256)])


def _counters() -> np.ndarray:
    """Return the counter after a zero and after a one: (256, 2) uint16. A counter is zeros * 16 + ones.

    A number rises to 15. If the other number exceeds 2, about half of it is kept (PAQ6).
    """
    after = np.zeros((256, 2), np.uint16)
    for counter in range(256):
        for bit in (0, 1):
            numbers = [counter // 16, counter % 16]
            numbers[bit] = min(15, numbers[bit] + 1)
            if numbers[1 - bit] > 2:
                numbers[1 - bit] = numbers[1 - bit] // 2 + 1
            after[counter, bit] = 16 * numbers[0] + numbers[1]
    return after


_AFTER = _counters()


class Learned(NamedTuple):
    """The part of a mixer that priming learns."""

    chances: np.ndarray
    """Adaptive probabilities: p, the number of observations, and ln(p / (1 - p)), (C + 1, 256, 3). A row has
    the p of a one for each counter of a context. The last row has the p that a match of each length is right.
    """
    weights: np.ndarray
    """(K, 256, I)."""
    maps: np.ndarray
    """Adaptive probability maps by last byte and node: (257, 256, steps + 1) float32. The last one ignores
    the byte."""

    @classmethod
    def nothing(cls) -> Learned:
        """Return a mixer that reproduces the model's distribution nearly."""
        zeros, ones = np.divmod(np.arange(256), 16)
        chances = np.empty((CONTEXTS + 1, 256, 3))
        chances[:CONTEXTS, :, 0] = (ones + 0.4) / (zeros + ones + 0.8)
        chances[CONTEXTS, :, 0] = 1 - 1 / (3 + np.arange(256))
        chances[:, :, 1] = 6
        chances[:, :, 2] = np.log(chances[:, :, 0] / (1 - chances[:, :, 0]))
        weights = np.full((_SETS, 256, _INPUTS), _WEIGHT)
        weights[:, :, 0] = 1.0
        line = 1 / (1 + np.exp(-np.linspace(-_MOST, _MOST, _STEPS + 1)))
        return cls(chances, weights, np.tile(line.astype(np.float32), (257, 256, 1)))


class State(NamedTuple):
    """The memory of a mixer, and its working memory."""

    learned: Learned
    slots: np.ndarray
    """Counters: (rows, 16) uint16."""
    claimed: np.ndarray
    """Numbers of the rows that are in use."""
    text: np.ndarray
    """The bytes that were read (uint8), and zeros behind them."""
    heads: np.ndarray
    """Position after the last occurrence of each hash of `_MATCH` bytes."""
    places: np.ndarray
    recent: np.ndarray
    contexts: np.ndarray
    """Hash of each context, (C,) uint64."""
    rows: np.ndarray
    """Row of each context's counters, for either half of the byte: (2, C); -1 if it was not seen before."""
    counters: np.ndarray
    """(8, C), as the next four for each bit."""
    inputs: np.ndarray
    chosen: np.ndarray
    """Set of weights that each selector chooses: (8, K)."""
    sums: np.ndarray
    """(8, K)."""
    lines: np.ndarray
    """Place in the adaptive probability maps: (8,)."""
    tree: np.ndarray
    """Probability of the bytes below each node, by the model: (512,), node 1 is the root."""

    @classmethod
    def empty(cls, learned: Learned) -> State:
        return cls(
            learned=learned,
            slots=np.zeros((_ROWS, 16), np.uint16),
            claimed=np.zeros(_ROWS, np.int32),
            text=np.zeros(1 << 16, np.uint8),
            heads=np.zeros(_HEADS, np.int64),
            places=np.array([0, 0, 0, 0, -1, 0, 0]),
            recent=np.zeros(4, np.uint64),
            contexts=np.zeros(CONTEXTS, np.uint64),
            rows=np.zeros((2, CONTEXTS), np.int64),
            counters=np.zeros((8, CONTEXTS), np.int64),
            inputs=np.zeros((8, _INPUTS)),
            chosen=np.zeros((8, _SETS), np.int64),
            sums=np.zeros((8, _SETS)),
            lines=np.zeros(8),
            tree=np.zeros(512),
        )


@inner
def _squash(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@inner
def _clipped(x: float) -> float:
    return min(max(x, -_MOST), _MOST)


@inner
def _find_contexts(state: State) -> None:
    """Hash the contexts of the next byte."""
    last = state.recent[_LAST]
    for order in range(5):
        state.contexts[order] = last & ((_ONE << np.uint64(8 * order)) - _ONE)
    state.contexts[5] = last & np.uint64(0xFFFFFFFFFFFF)
    state.contexts[6] = state.recent[_WORD]
    state.contexts[7] = appended(state.recent[_WORD], state.recent[_WORD_1])
    state.contexts[8] = appended(state.contexts[7], state.recent[_WORD_2])
    column = state.places[SIZE] - state.places[LINE]
    above = state.places[ABOVE] + column
    over = state.text[above] if state.places[ABOVE] >= 0 and above < state.places[LINE] else 0
    state.contexts[9] = appended(appended(np.uint64(column), np.uint64(over)), last & np.uint64(255))
    for i in range(CONTEXTS):
        state.contexts[i] = mixed(_NONE, appended(state.contexts[i], np.uint64(i)), _ONE)


@inner
def _find_rows(state: State, node: int, claim: bool) -> None:
    """Find each context's row for the half byte that begins at a node; with ``claim``, empty missing rows."""
    half = 1 if node >= 16 else 0
    for i in range(CONTEXTS):
        key = mixed(_NONE, appended(state.contexts[i], np.uint64(node)), _ONE)
        row = np.int64(key & np.uint64(_ROWS - 1))
        check = np.uint16(key >> np.uint64(48)) | np.uint16(1)
        known = state.slots[row, 0] == check
        if claim and not known:
            if state.slots[row, 0] == 0:
                state.claimed[state.places[CLAIMED]] = row
                state.places[CLAIMED] += 1
            state.slots[row] = 0
            state.slots[row, 0] = check
        state.rows[half, i] = row if known or claim else -1


@inner
def _grow_tree(state: State, p_B: np.ndarray) -> None:
    for byte in range(256):
        state.tree[256 + byte] = p_B[byte]
    for node in range(255, 0, -1):
        state.tree[node] = state.tree[2 * node] + state.tree[2 * node + 1]


@inner
def _expected_bit(state: State, node: int, depth: int) -> int:
    """Return the bit that the match expects at a node; -1 without a match."""
    if state.places[LENGTH] == 0:
        return -1
    expected = int(state.text[state.places[EXPECTED]]) | 256
    return int(expected >> (7 - depth)) & 1 if expected >> (8 - depth) == node else -1


@inner
def _chosen_weights(state: State, depth: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    weights = state.learned.weights
    chosen = state.chosen[depth]
    return weights[0, chosen[0]], weights[1, chosen[1]], weights[2, chosen[2]]


@inner
def _predict(state: State, node: int, depth: int) -> float:
    """Return the probability of a one at a node of a depth."""
    inputs = state.inputs[depth]
    rows = state.rows[depth // 4]
    # A byte that the model excludes keeps a tiny probability.
    ratio = (state.tree[2 * node + 1] + 1e-30) / (state.tree[2 * node] + 1e-30)
    inputs[0] = _clipped(math.log(ratio))
    slot = _slot(node, depth)
    seen = 0
    for i in range(CONTEXTS):
        counter = int(state.slots[rows[i], slot]) if rows[i] >= 0 else 0
        state.counters[depth, i] = counter
        inputs[1 + i] = state.learned.chances[i, counter, 2] if counter else 0.0
        seen += counter > 0
    expected = _expected_bit(state, node, depth)
    inputs[_INPUTS - 1] = 0.0
    if expected >= 0:
        surety = state.learned.chances[CONTEXTS, state.places[LENGTH], 2]
        inputs[_INPUTS - 1] = surety if expected else -surety
    last = np.int64(state.recent[_LAST] & np.uint64(255))
    state.chosen[depth, 0] = seen
    state.chosen[depth, 1] = node
    state.chosen[depth, 2] = last
    by_seen, by_node, by_last = _chosen_weights(state, depth)
    of_seen = of_node = of_last = 0.0
    for i in range(_INPUTS):
        x = inputs[i]
        of_seen += by_seen[i] * x
        of_node += by_node[i] * x
        of_last += by_last[i] * x
    state.sums[depth, 0] = of_seen
    state.sums[depth, 1] = of_node
    state.sums[depth, 2] = of_last
    total = _clipped((of_seen + of_node + of_last) / _SETS)
    place = (total + _MOST) * (_STEPS / (2 * _MOST))
    state.lines[depth] = place
    step = min(int(place), _STEPS - 1)
    part = place - step
    p = 0.5 * _squash(total)
    for byte in (last, 256):
        line = state.learned.maps[byte, node]
        p += 0.25 * (line[step] * (1 - part) + line[step + 1] * part)
    return min(max(p, 1e-6), 1 - 1e-6)


@inner
def _slot(node: int, depth: int) -> int:
    """Return the place of a node in the rows of its half byte."""
    return int(1 << (depth & 3) | node & ((1 << (depth & 3)) - 1))


@inner
def _learn(state: State, node: int, depth: int, bit: int, rate: float) -> None:
    """Learn the bit of a node, which `_predict` has predicted. All bits of the byte are predicted before."""
    inputs = state.inputs[depth]
    place = state.lines[depth]
    step = min(int(place), _STEPS - 1)
    part = place - step
    for byte in (state.chosen[depth, 2], 256):
        line = state.learned.maps[byte, node]
        line[step] += _MAP_RATE * (1 - part) * (bit - line[step])
        line[step + 1] += _MAP_RATE * part * (bit - line[step + 1])
    by_seen, by_node, by_last = _chosen_weights(state, depth)
    of_seen = rate * (bit - _squash(state.sums[depth, 0]))
    of_node = rate * (bit - _squash(state.sums[depth, 1]))
    of_last = rate * (bit - _squash(state.sums[depth, 2]))
    for i in range(_INPUTS):
        x = inputs[i]
        by_seen[i] += of_seen * x
        by_node[i] += of_node * x
        by_last[i] += of_last * x
    rows = state.rows[depth // 4]
    slot = _slot(node, depth)
    for i in range(CONTEXTS):
        counter = state.counters[depth, i]
        if counter:
            _adapt(state.learned.chances[i, counter], bit)
        state.slots[rows[i], slot] = _AFTER[counter, bit]
    expected = _expected_bit(state, node, depth)
    if expected >= 0:
        _adapt(state.learned.chances[CONTEXTS, state.places[LENGTH]], bit == expected)


@inner
def _adapt(chance: np.ndarray, happened: int) -> None:
    """Move an adaptive probability towards what happened."""
    p = chance[0] + (happened - chance[0]) / (chance[1] + 1.5)
    p = min(max(p, 1 / 4096), 1 - 1 / 4096)
    chance[0] = p
    chance[2] = math.log(p / (1 - p))
    chance[1] = min(chance[1] + 1, _LIMIT)


@inner
def _append(state: State, byte: int) -> None:
    """Add a byte to the text, and find a match of its end."""
    places, recent, text = state.places, state.recent, state.text
    size = places[SIZE]
    text[size] = byte
    if places[LENGTH] and text[places[EXPECTED]] == byte:
        places[LENGTH] = min(places[LENGTH] + 1, _LONGEST)
        places[EXPECTED] += 1
    else:
        places[LENGTH] = 0
    size += 1
    places[SIZE] = size
    recent[_LAST] = recent[_LAST] << _EIGHT | np.uint64(byte)
    if _OF_WORD[byte]:
        recent[_WORD] = appended(recent[_WORD], np.uint64(_LOWER[byte]))
    elif recent[_WORD]:
        recent[_WORD_2] = recent[_WORD_1]
        recent[_WORD_1] = recent[_WORD]
        recent[_WORD] = _NONE
    if byte == 10:
        places[ABOVE] = places[LINE]
        places[LINE] = size
    head = np.int64(mixed(_NONE, recent[_LAST] << np.uint64(64 - 8 * _MATCH), _ONE) & np.uint64(_HEADS - 1))
    at = state.heads[head]
    if places[LENGTH] == 0 and at > places[BEGIN]:
        length = 0
        while (
            length < _LONGEST
            and at - length > places[BEGIN]
            and text[at - 1 - length] == text[size - 1 - length]
        ):
            length += 1
        if length >= _MATCH:
            places[LENGTH] = length
            places[EXPECTED] = at
    state.heads[head] = size


@compiled
def mix(state: State, p_B: np.ndarray, mixed_B: np.ndarray) -> None:
    """Write the probability of each byte, given that a byte follows, and learn nothing.

    ``p_B`` are the model's probabilities of the bytes; only their ratios matter.
    """
    tree = np.empty(512)
    tree[1] = 1.0
    _grow_tree(state, p_B)
    _find_contexts(state)
    for top in range(1, 32):
        if 1 < top < 16:
            continue
        _find_rows(state, top, False)
        for level in range(4):
            for low in range(1 << level):
                node = top << level | low
                p = _predict(state, node, level + 4 * (top > 1))
                tree[2 * node] = tree[node] * (1 - p)
                tree[2 * node + 1] = tree[node] * p
    mixed_B[:] = tree[256:]


@compiled
def read(state: State, p_SB: np.ndarray, byte_S: np.ndarray, rate: float, nats_S: np.ndarray) -> float:
    """Write the nats of each byte, given that a byte follows, and learn from it. `State.text` is long enough.

    Returns:
        The largest deviation from one of the sum of probabilities at every `CHECK_EVERY`-th byte.
    """
    mixed_B = np.empty(256)
    deviation = 0.0
    for s in range(len(byte_S)):
        if state.places[SIZE] % CHECK_EVERY == 0:
            mix(state, p_SB[s], mixed_B)
            deviation = max(deviation, abs(mixed_B.sum() - 1))
        byte = int(byte_S[s])
        _grow_tree(state, p_SB[s])
        _find_contexts(state)
        p_byte = 1.0
        for depth in range(8):
            node = (byte | 256) >> (8 - depth)
            if depth in (0, 4):
                _find_rows(state, node, True)
            p = _predict(state, node, depth)
            p_byte *= p if (byte >> (7 - depth)) & 1 else 1 - p
        nats_S[s] = -math.log(p_byte)
        for depth in range(8):
            _learn(state, (byte | 256) >> (8 - depth), depth, (byte >> (7 - depth)) & 1, rate)
        _append(state, byte)
    return deviation
