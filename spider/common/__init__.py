"""All packages share these modules, and they import none of the packages.

results.py      every path of a results folder
files.py        a file is written whole or not at all; digests
sealed.py       the same for a folder
record.py       one shape for each JSON file
errors.py       errors that stop a job with a sentence
formatting.py   numbers and text for people, without secrets; how far a long loop is
extras.py       entry points of packages in ``extras/``
"""

VERSION = "0.2.0"
