"""Special tokens that separate the turns of a conversation, the same in every vocabulary.

    BOS (SYSTEM text TURN)? (USER text TURN ASSISTANT text TURN)+ EOS

The token ids alone show which text is an assistant's (`assistant_mask`), and where an answer ends. No text
can contain these tokens, so no message can pretend to be another's. They are four of the reserved tokens;
descriptions of datasets keep the reserved names, because digests depend on them.
"""

from __future__ import annotations

import numpy as np

from spider.tokens.bytes import BYTES

SYSTEM, USER, ASSISTANT, TURN = (BYTES.specials[f"RESERVED_{i}"] for i in range(4))
ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}
_BOUNDARIES = np.array([BYTES.bos, *ROLES.values(), TURN])


def assistant_mask(ids_T: np.ndarray, inside: bool = False) -> np.ndarray:
    """Return which tokens of a stream belong to an answer, (T,) bool: those after ASSISTANT, up to and
    including TURN.

    ``inside`` states whether the stream begins in the middle of an answer.
    """
    if not len(ids_T):
        return np.zeros(0, bool)
    at_T = np.where(np.isin(ids_T, _BOUNDARIES), np.arange(len(ids_T)), -1)
    latest_T = np.maximum.accumulate(np.append(-1, at_T[:-1]))  # the last boundary before each token
    return np.where(latest_T < 0, inside, ids_T[latest_T] == ASSISTANT)


def ends_inside_answer(ids_T: np.ndarray) -> bool:
    """Return whether the next token belongs to an answer."""
    return bool(assistant_mask(np.append(ids_T, BYTES.pad))[-1])
