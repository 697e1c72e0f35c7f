"""Answers from the records of all jobs: what a file was made from, and why two results differ.

lineage.py       the jobs that led to a file, found by the digests of inputs and outputs
differences.py   the first causes of a difference between two results
"""
