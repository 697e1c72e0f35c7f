"""Cleaning of text before it is encoded: duplicates and text of evaluations are found and left out.

words.py        words of documents, and hashes of texts and of sequences of words
signatures.py   a row for each document of a part: the hash of its text
exact.py        pairs of documents with the same text
decontaminate.py  documents with text that models are measured with
drop.py         which documents are removed, from all pairs of a part
evidence.py     the form of pairs and of what is removed, with its record
show.py         what was removed, for people
"""
