"""Cleaning of text before it is encoded: duplicates and text of evaluations are found and left out.

words.py           words of documents, and hashes of texts and of sequences of words
lines.py           lines of templates, which say nothing about copies
minhash.py         pairs of documents that may be copies, without comparing all pairs
signatures.py      a row for each document of a part: the hash of its text, and its bands of MinHash
pairs.py           pairs of documents with the same text, and of near duplicates
verify.py          how much of a document is in another one
decontaminate.py   documents with text that models are measured with
drop.py            which documents are removed, from all pairs of a part
evidence.py        the form of pairs and of what is removed, with its record
show.py            what was removed, for people
"""
