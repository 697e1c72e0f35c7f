"""The record of an audit by the extra trust."""

#: The checks that score again.
SCORED_AGAIN = ("score", "distribution", "causality")
