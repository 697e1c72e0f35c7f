"""Cleaning of text before it is encoded: duplicates and text of evaluations are found and left out.

words.py        words of documents, and hashes of texts and of sequences of words
"""
