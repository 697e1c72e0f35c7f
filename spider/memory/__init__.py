"""Memory of a text: what followed its contexts, kept in tables, and proposed where they come again.

symbols.py    bytes, and the beginning and the end of a document
compiled.py   how loops over symbols are compiled
hashes.py     hashes of stretches of a text
contexts.py   what stands before a place: so many symbols, or words
count.py      runs of counts of one part of a text (map)
table.py      all runs of an order as one packed table (reduce)
arrays.py     arrays on disk
store.py      the tables of a text on disk, `memory.json`, and their checks
propose.py    what tables and document propose for a place
layout.py     how that is laid out in bytes
proposer.py   proposals for windows of shards, for streams, and for a text being written
"""
