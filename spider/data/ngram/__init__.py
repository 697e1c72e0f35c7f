"""The n-gram index of a text: what followed its contexts, counted in tables, and candidates from them.

contexts.py     contexts of a position: the last symbols or words, and their hashes
table.py        count the contexts of a part of a text into runs (map), and merge them into tables (reduce)
store.py        an index on disk: its tables, `index.json` and their checks
layout.py       the symbols of a text, and the bytes that describe the candidates of a position
candidates.py   candidates of a position, from the tables and from the document so far
lookup.py       candidates for windows of shards, for streams and during generation
"""
