"""Try to disprove the score of a stage: each module is one check, and returns a `Finding`.

    splits        held-out documents, or copies of them, in the training text
    digests       each link from raw file to score, hashed again
    score         bits per byte, computed again by another path
    distribution  probabilities sum to one; the bytes counted are those of the text
    causality     no prediction depends on a byte after it
    replay        a stretch of the training gives the same bytes again
    code          what differs between the code that made the files and the code that stands here

`spider.audit.claim.Claim` has what the checks read, `spider.audit.record` what they write.
"""

#: The checks that score again, in a process of their own (`spider.audit.fresh`). The causality comes last
#: there, because it makes the model float64. Their modules have a function ``examine``.
SCORED_AGAIN = ("score", "distribution", "causality")
#: Names of the checks, in order. Each other check is a module of this package with a function ``check``.
CHECKS = ("digests", "splits", "distribution", "causality", "score", "replay", "code")
