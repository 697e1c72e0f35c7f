#!/usr/bin/env bash
# DuckDB's type JSON is another name of VARCHAR, but pyarrow reads a JSON column of its Parquet files as no string.
#
# Guess:     DuckDB documents JSON as an alias of VARCHAR, and the file stores such a column as UTF-8. So pyarrow
#            reads both as strings, and a program that looks for string columns finds both.
# Behaviour: the JSON column is an extension type, `extension<arrow.json>`. `is_string` is false, and the functions of
#            strings raise ArrowNotImplementedError. Python values are equal, so a look at the table shows no difference.
#            A UUID column is an extension type as well. `.cast(pa.string())` makes text of JSON, but of a UUID it makes
#            its 16 bytes, and it fails where these are no UTF-8.
# Seen with: duckdb 2.0.1, pyarrow 25.0.1 on Python 3.11:
#            plain: string, is_string True, lengths [3]
#            text: extension<arrow.json>, is_string False, lengths ArrowNotImplementedError
#            equal values: True, text cast: '123', id cast: '0123456789abcdef'
# Exits with 1 if this has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet --disable-pip-version-check duckdb==2.0.1 pyarrow==25.0.1
cat > strings.py <<'PYTHON'
import sys

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

columns = "'123' AS plain, '123'::JSON AS text, '30313233-3435-3637-3839-616263646566'::UUID AS id"
duckdb.sql(f"COPY (SELECT {columns}) TO 'a.parquet'")
table = pq.read_table("a.parquet")
seen = []
for name in ("plain", "text"):
    column = table[name]
    try:
        lengths = pc.utf8_length(column).to_pylist()
    except pa.ArrowNotImplementedError as error:
        lengths = type(error).__name__
    seen.append((str(column.type), pa.types.is_string(column.type), lengths))
    print(f"{name}: {column.type}, is_string {seen[-1][1]}, lengths {lengths}")
equal = table["plain"].to_pylist() == table["text"].to_pylist()
texts = [table[name].cast(pa.string()).to_pylist()[0] for name in ("text", "id")]
print(f"equal values: {equal}, text cast: {texts[0]!r}, id cast: {texts[1]!r}")
expected = [("string", True, [3]), ("extension<arrow.json>", False, "ArrowNotImplementedError")]
sys.exit(not (seen == expected and equal and texts == ["123", "0123456789abcdef"]))
PYTHON
env/bin/python strings.py
