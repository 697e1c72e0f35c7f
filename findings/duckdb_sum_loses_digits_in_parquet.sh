#!/usr/bin/env bash
# DuckDB writes the sum of integers to Parquet as floating point, so two numbers that differ there are equal in the file.
#
# Guess:     a sum of BIGINT is an integer. DuckDB prints it exactly, so the Parquet file has it exactly, or COPY fails.
# Behaviour: the sum is a HUGEINT, for which Parquet has no type, and COPY writes a column of doubles without a word.
#            Above 2^53 neighbours become one value. Read again by DuckDB itself, they are equal. Numbers that
#            identify rows are merged by this, and so is a cast of ids to HUGEINT.
# Seen with: duckdb 2.0.1, pyarrow 25.0.1 on Python 3.11:
#            in DuckDB: 9007199254740992 9007199254740993
#            in the file (double): 9007199254740992.0 9007199254740992.0
# Exits with 1 if this has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet --disable-pip-version-check duckdb==2.0.1 pyarrow==25.0.1
cat > sums.py <<'PYTHON'
import sys

import duckdb
import pyarrow.parquet as pq

numbers = "SELECT (1::BIGINT << 53) + i AS n, i FROM range(2) t(i)"
sums = duckdb.sql(f"SELECT sum(n) AS id FROM ({numbers}) GROUP BY i ORDER BY i")
exact = [row[0] for row in sums.fetchall()]
sums.write_parquet("a.parquet")
column = pq.read_table("a.parquet")["id"]
print("in DuckDB:", *exact)
print(f"in the file ({column.type}):", *column.to_pylist())
sys.exit(not (exact == [2**53, 2**53 + 1] and column.to_pylist() == [2.0**53] * 2))
PYTHON
env/bin/python sums.py
