"""Special tokens that separate the turns of a conversation, the same in every vocabulary.

    BOS (SYSTEM text TURN)? (USER text TURN ASSISTANT answer TURN)+ EOS
    answer: (text | PYTHON_START text PYTHON_END (OUTPUT_START text OUTPUT_END)?)+

The token ids alone show what an assistant writes (`assistant_mask`), and where an answer ends. No text can
contain these tokens, so no message can pretend to be another's. They are the six reserved tokens and two
that were named for loops and never written; descriptions of datasets keep these names, because digests
depend on them.
"""

from __future__ import annotations

import numpy as np

from spider.tokens import BYTES

SYSTEM, USER, ASSISTANT, TURN, PYTHON_START, PYTHON_END = (BYTES.specials[f"RESERVED_{i}"] for i in range(6))
OUTPUT_START, OUTPUT_END = BYTES.specials["LOOP_START"], BYTES.specials["LOOP_END"]
ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}
_BOUNDARIES = np.array([BYTES.bos, *ROLES.values(), TURN, OUTPUT_START, OUTPUT_END])


def assistant_mask(ids_T: np.ndarray, inside: bool = False) -> np.ndarray:
    """Return which tokens of a stream an assistant writes, (T,) bool: those after ASSISTANT, up to and
    including TURN, without the outputs of its calls.

    ``inside`` states whether the stream begins in the middle of what an assistant writes.
    """
    if not len(ids_T):
        return np.zeros(0, bool)
    at_T = np.where(np.isin(ids_T, _BOUNDARIES), np.arange(len(ids_T)), -1)
    latest_T = np.maximum.accumulate(np.append(-1, at_T[:-1]))  # the last boundary before each token
    written_T = np.where(latest_T < 0, inside, np.isin(ids_T[latest_T], (ASSISTANT, OUTPUT_END)))
    return written_T & (ids_T != OUTPUT_START)


def ends_inside_answer(ids_T: np.ndarray) -> bool:
    """Return whether an assistant writes the next token, unless it begins an output."""
    return bool(assistant_mask(np.append(ids_T, BYTES.pad))[-1])
