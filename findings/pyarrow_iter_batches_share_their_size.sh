#!/usr/bin/env bash
# With pyarrow 25 a second `iter_batches` of a ParquetFile changes the size of the batches of a first one that still runs.
#
# Guess:     each call of `ParquetFile.iter_batches(batch_size, row_groups)` returns an iterator of its own, with its own size.
# Behaviour: the call sets the size in the reader of the file, and all iterators of that reader ask it at each batch. So what
#            a reader of one row group gets depends on who reads another one meanwhile. A ParquetFile for each iterator, with
#            `metadata=` of the first so that the footer is read once, keeps them apart.
# Seen with: pyarrow 25.0.1, Python 3.11; row groups of 100 rows:
#            [10, 40, 40, 10]       <- the first iterator, asked for 10, with one of 40 begun after its first batch
#            [10, 10, 10, 10, 10, 10, 10, 10, 10, 10]     <- with a reader of its own
# Exits with 1 if this has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet --disable-pip-version-check pyarrow==25.0.1
cat > seen.py <<'PYTHON'
import io

import pyarrow as pa
import pyarrow.parquet as pq

pq.write_table(pa.table({"x": range(200)}), sink := io.BytesIO(), row_group_size=100)
shared = pq.ParquetFile(sink)
for other in (shared, pq.ParquetFile(sink, metadata=shared.metadata)):
    first = shared.iter_batches(10, [0])
    sizes = [len(next(first))]
    next(other.iter_batches(40, [1]))
    print(sizes + [len(batch) for batch in first])
PYTHON
env/bin/python seen.py | tee seen.txt
diff seen.txt - <<'SEEN'
[10, 40, 40, 10]
[10, 10, 10, 10, 10, 10, 10, 10, 10, 10]
SEEN
