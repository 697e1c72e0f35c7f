#!/usr/bin/env bash
# datasets does not read a parquet file without rows, as pyarrow and pandas write it; the message is of a batch size.
#
# Guess:     an empty file among others adds no rows.
# Behaviour: the writers give the file one row group of no rows. datasets takes the size of its batches from the first
#            row group and asks pyarrow for batches of 0 rows. A stream fails when it comes to that file, which may be
#            hours after its start. A `batch_size` of one's own is the cure.
# Seen with: datasets 5.2.0, pyarrow 25.0.1, Python 3.11:
#            a stream: ArrowInvalid: BatchSize must be greater than 0, got 0
#            with batch_size=1000: ['a', 'b']
# Exits with 1 if this has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HF_HOME="$folder/home"
python3 -m venv env
env/bin/pip install --quiet --disable-pip-version-check datasets==5.2.0 pyarrow==25.0.1
cat > empty.py <<'PYTHON'
import logging
import sys

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import load_dataset

logging.disable()
pq.write_table(pa.table({"text": ["a", "b"]}), "full.parquet")
pq.write_table(pa.table({"text": pa.array([], pa.string())}), "empty.parquet")
files = ["full.parquet", "empty.parquet"]


def texts(**options: int) -> list[str]:
    return [row["text"] for row in load_dataset("parquet", data_files=files, split="train", streaming=True, **options)]


try:
    found = str(texts())
except pa.ArrowInvalid as error:
    found = f"ArrowInvalid: {str(error).splitlines()[0]}"
print("a stream:", found)
cured = texts(batch_size=1000)
print("with batch_size=1000:", cured)
sys.exit(not (found == "ArrowInvalid: BatchSize must be greater than 0, got 0" and cured == ["a", "b"]))
PYTHON
env/bin/python empty.py
