"""Decide whether a change helps, from pairs of runs that share their seed.

noise        runs that differ by their seed alone, and how much a seed moves a score
sequential   the test after each pair, with a bound on false verdicts
record       ``verdicts.jsonl``: each verdict with the digests of what it compares
trial        train pairs in turn until the test decides
"""
