#!/usr/bin/env bash
# datasets gives all parquet files the types of the first one, and casts strings to numbers without a word.
#
# Guess:     of two parquet files, one with integers as ids and one with strings, each keeps its ids, or the difference
#            is an error.
# Behaviour: the order of the files decides. After a file of integers the string "0060" is 60. After a file of strings
#            the integer 1 is "1". So a hash of the id, which may decide what is held out, depends on the order. A
#            stream and a load do the same.
# Seen with: datasets 5.2.0, pyarrow 25.0.1, Python 3.11:
#            numbers first: [1, 2, 60, 61]
#            strings first: ['0060', '0061', '1', '2']
# Exits with 1 if this has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HF_HOME="$folder/home"
python3 -m venv env
env/bin/pip install --quiet --disable-pip-version-check datasets==5.2.0 pyarrow==25.0.1
cat > ids.py <<'PYTHON'
import sys

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import disable_progress_bars, load_dataset

disable_progress_bars()
pq.write_table(pa.table({"id": [1, 2]}), "numbers.parquet")
pq.write_table(pa.table({"id": ["0060", "0061"]}), "strings.parquet")


def ids(*files: str, **options: bool) -> list:
    return [row["id"] for row in load_dataset("parquet", data_files=files, split="train", **options)]


numbers_first = ids("numbers.parquet", "strings.parquet", streaming=True)
strings_first = ids("strings.parquet", "numbers.parquet", streaming=True)
print("numbers first:", numbers_first)
print("strings first:", strings_first)
same = ids("numbers.parquet", "strings.parquet") == numbers_first
sys.exit(not (same and numbers_first == [1, 2, 60, 61] and strings_first == ["0060", "0061", "1", "2"]))
PYTHON
env/bin/python ids.py
