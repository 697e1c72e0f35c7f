"""Cleaning of text before it is encoded: duplicates and text of evaluations are found and left out.

words.py           words of documents, hashes of texts and of sequences of words, and lines of templates
signatures.py      a row for each document of a part: the hash of its text, and its bands of MinHash
buckets.py         documents that share a hash or a band, in all parts; pairs with the same text
pairs.py           pairs of near duplicates
decontaminate.py   documents with text that models are measured with
evidence.py        the form of pairs; which documents are removed, with a record, and shown to people
"""
