"""Who speaks in a conversation: special ids between texts, the same in every vocabulary.

    BOS (SYSTEM text TURN)? (USER text TURN ASSISTANT text TURN)+ EOS

So what an assistant says, and that it has ended, can be told from the ids alone (`learned`), and no text can
make believe that somebody else speaks. The ids are four that were reserved for later formats; descriptions of
datasets call them by that name still, for their digests know it.
"""

from __future__ import annotations

import numpy as np

from spider.tokens.bytes import BYTES

SYSTEM, USER, ASSISTANT, TURN = (BYTES.specials[f"RESERVED_{i}"] for i in range(4))
ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}
_SPEAKERS = np.array([BYTES.bos, *ROLES.values(), TURN])


def learned(ids_T: np.ndarray, inside: bool = False) -> np.ndarray:
    """Which of a stream's ids an assistant says: all after ASSISTANT up to its TURN, with that, (T,) bool.
    ``inside``: it begins in the middle of such an answer."""
    if not len(ids_T):
        return np.zeros(0, bool)
    at_T = np.where(np.isin(ids_T, _SPEAKERS), np.arange(len(ids_T)), -1)
    before_T = np.maximum.accumulate(np.append(-1, at_T[:-1]))  # who spoke last
    return np.where(before_T < 0, inside, ids_T[before_T] == ASSISTANT)


def answering(ids_T: np.ndarray) -> bool:
    """Whether what follows these ids is said by an assistant."""
    speakers = ids_T[np.isin(ids_T, _SPEAKERS)]
    return bool(len(speakers) and speakers[-1] == ASSISTANT)
