#!/usr/bin/env bash
# Snakemake 9.27's benchmark file has the processor time and the memory of the last look, not those of the job's end.
#
# Guess:     `benchmark:` writes what the job took: `cpu_time` is the processor time of its processes when they end, as
#            getrusage(2) tells, and `max_rss` is the most memory that they held.
# Behaviour: a thread looks at the processes every half second, and from the 15th second on every 30. Nothing looks when the
#            job ends. So a job of 44 s has the processor time of its first 15 s, and memory that is used between two looks
#            is not seen. `s` alone is that of the whole job. In short jobs `cpu_time` misses up to half.
# Seen with: snakemake 9.27.1, Python 3.11; a job that computes for 24 s, and holds 400 MB from its 17th to its 21st second:
#            the job itself      cpu 24 s   memory 395 MB
#            its benchmark file  cpu 15 s   memory 13 MB   s 24
# Exits with 1 if this has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet --disable-pip-version-check snakemake==9.27.1
cat > job.py <<'PYTHON'
import json
import resource
import time

began, held = time.monotonic(), None
while (passed := time.monotonic() - began) < 24:
    if 17 < passed < 21:
        held = held or b"x" * 400_000_000
    else:
        held = None
used = resource.getrusage(resource.RUSAGE_SELF)
with open("own.json", "w") as file:
    json.dump({"cpu": used.ru_utime + used.ru_stime, "memory": used.ru_maxrss / 1024}, file)
PYTHON
cat > Snakefile <<'SNAKEFILE'
rule job:
    output: "own.json"
    benchmark: "job.tsv"
    shell: "python3 job.py"
SNAKEFILE
env/bin/snakemake --quiet --cores 1
cat > compare.py <<'PYTHON'
import csv
import json
import sys

with open("own.json") as file:
    own = json.load(file)
with open("job.tsv") as file:
    (row,) = csv.DictReader(file, delimiter="\t")
seen = {name: float(row[name]) for name in ("s", "cpu_time", "max_rss")}
print(f"the job itself      cpu {own['cpu']:.0f} s   memory {own['memory']:.0f} MB")
print(f"its benchmark file  cpu {seen['cpu_time']:.0f} s   memory {seen['max_rss']:.0f} MB   s {seen['s']:.0f}")
sys.exit(not (seen["cpu_time"] < 0.8 * own["cpu"] and seen["max_rss"] < 0.5 * own["memory"] and seen["s"] > 20))
PYTHON
python3 compare.py
