"""NgramIndex of a text: what followed its contexts, kept in tables, and proposed where they come again.

contexts.py   what stands before a place: so many symbols, or words, and hashes of them
runs.py       arrays on disk, and runs of counts, merged
count.py      runs of counts of one part of a text (map)
table.py      all runs of an order as one packed table (reduce)
store.py      the tables of a text on disk, `index.json`, and their checks
propose.py    what tables and document propose for a place
layout.py     the symbols of a text, and how candidates are laid out in bytes
lookup.py   candidates for windows of shards, for streams, and for a text being written
"""
