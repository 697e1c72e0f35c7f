"""Verify a score: `spider verify` hashes the files again, splits the text again, and scores a part again.

Each module is one check:

    digests   each file from raw text to score is the one that a job recorded
    splits    each document is in the split that the rule gives
    score     the text and the weights are those that were scored, and have the same bits per byte again

`spider_trust` (``extras/trust``) has further checks, which take longer or look deeper.
"""

from __future__ import annotations

from functools import partial

from spider.verify.claim import Checks, Claim


def checks(claim: Claim, quick: bool) -> Checks:
    """Return the checks of a score by name; ``quick`` ones look at samples."""
    from spider.verify import digests, score, splits

    return {
        "digests": partial(digests.check, claim, quick),
        "splits": partial(splits.check, claim, quick),
        "score": partial(score.check, claim, quick),
    }
