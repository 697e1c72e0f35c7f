#!/usr/bin/env bash
# tiktoken 0.14 encodes four times slower with a vocabulary that has no special token than with one that has one.
#
# Guess:     a vocabulary without special tokens is encoded as fast as one with them, or faster, because there is nothing to
#            look for. And `encode_to_numpy`, which makes no list, is the fastest way to an array of ids.
# Behaviour: without any special token `encode` and `encode_to_numpy` take about four times as long as `encode_ordinary` and
#            an array of its list. With a single special token, which is in no text, `encode` takes as long as
#            `encode_ordinary`, and `encode_to_numpy` less. The ids are the same in all cases. So who learns a vocabulary of
#            bytes and merges alone gets the slow path, unless he calls `encode_ordinary` or adds a token that he never uses.
# Seen with: tiktoken 0.14.0, numpy 2.4.6, Python 3.11; processor time, as a multiple of `encode_ordinary` and an array:
#            special tokens: 0    encode 4.4    encode_to_numpy 4.4
#            special tokens: 1    encode 1.0    encode_to_numpy 0.8
# Exits with 1 if this has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet --disable-pip-version-check tiktoken==0.14.0 numpy==2.4.6
cat > speed.py <<'PYTHON'
import random
import sys
import time
from collections.abc import Callable
from itertools import product
from statistics import median

import numpy as np
from tiktoken import Encoding

# A vocabulary of all bytes, and of each beginning of some words.
words = [" " + "".join(parts) for parts in product(("re", "pro", "in"), ("duct", "port", "form"), ("ion", "ing", "ed"))]
beginnings = {word[:end].encode(): None for end in range(2, 12) for word in words if len(word) >= end}
ranks = {token: rank for rank, token in enumerate([*(bytes([value]) for value in range(256)), *beginnings])}
rng = random.Random(0)
texts = ["".join(rng.choices(words, k=300)) for _ in range(1000)]


def seconds(encode: Callable[[str], object]) -> float:
    start = time.process_time()
    for text in texts:
        encode(text)
    return time.process_time() - start


found = {}
for count in (0, 1):
    special = {"<|end|>": len(ranks)} if count else {}
    made = Encoding("made", pat_str=r" ?\p{L}+|[^\s\p{L}]+|\s+", mergeable_ranks=ranks, special_tokens=special)
    ways = {
        "ordinary": lambda text, made=made: np.array(made.encode_ordinary(text), np.uint32),
        "encode": lambda text, made=made: np.array(made.encode(text, disallowed_special=()), np.uint32),
        "to_numpy": lambda text, made=made: made.encode_to_numpy(text, disallowed_special=()),
    }
    for way in ways.values():
        assert (way(texts[0]) == ways["ordinary"](texts[0])).all()
    rounds = [{name: seconds(way) for name, way in ways.items()} for _ in range(5)]
    found[count] = {name: median(one[name] / one["ordinary"] for one in rounds) for name in ways}
    print(f"special tokens: {count}    encode {found[count]['encode']:.1f}    encode_to_numpy {found[count]['to_numpy']:.1f}")
slow = min(found[0]["encode"], found[0]["to_numpy"]) > 1.8
sys.exit(not (slow and max(found[1]["encode"], found[1]["to_numpy"]) < 1.4))
PYTHON
env/bin/python speed.py
