#!/usr/bin/env bash
# With Snakemake 9.27 one default resource, such as `runtime`, makes a dry run measure the inputs of every job.
#
# Guess:     `--default-resources runtime=60` gives each job a time limit and nothing else. A job then has the resources that
#            its rule, the command line or the profile names.
# Behaviour: each job also gets `mem_mb` and `disk_mb`, which are twice the size of its inputs. For that the dry run looks at
#            every input file and starts an event loop a job and resource. The plan of 400 small jobs takes about 1.4 times
#            the processor time. It takes no longer if the profile names constants for these two as well. Without any default
#            resource a job has neither.
# Seen with: snakemake 9.27.1, Python 3.11; processor seconds of the dry run, as a multiple of the first:
#            no default                          1.00   resources of a job: tmpdir
#            runtime=60                          1.40   resources of a job: disk_mb, mem_mb, runtime, tmpdir
#            runtime=60 mem_mb=9 disk_mb=9       1.10   resources of a job: disk_mb, mem_mb, runtime, tmpdir
# Exits with 1 if this has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet --disable-pip-version-check snakemake==9.27.1
mkdir in
for number in $(seq 400); do echo text > "in/$number"; done
cat > Snakefile <<'SNAKEFILE'
rule all:
    input: expand("out/{number}", number=range(1, 401))
rule copy:
    input: "in/{number}"
    output: "out/{number}"
    shell: "cp {input} {output}"
SNAKEFILE
cat > plan.py <<'PYTHON'
import re
import resource
import subprocess
import sys
from statistics import median

WAYS = {"no default": [], "runtime=60": ["runtime=60"], "all three": ["runtime=60", "mem_mb=9", "disk_mb=9"]}


def plan(defaults: list[str], *words: str) -> tuple[float, str]:
    """Return the processor seconds of a dry run, and what it prints."""
    options = ["--default-resources", *defaults] if defaults else []
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = ["env/bin/snakemake", "--cores", "1", "-n", *words, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout + done.stderr


names = {}
for way, defaults in WAYS.items():
    line = re.search(r"resources: (.*)", plan(defaults, "out/1")[1])
    names[way] = sorted(re.findall(r"(\w+)=", line[1])) if line else []
rounds = [{way: plan(defaults, "--quiet", "all")[0] for way, defaults in WAYS.items()} for _ in range(5)]
ratio = {way: median(one[way] / one["no default"] for one in rounds) for way in WAYS}
for way in WAYS:
    print(f"{way:12} {ratio[way]:.2f}   resources of a job: {', '.join(names[way])}")
added = {"mem_mb", "disk_mb"}
same = added.isdisjoint(names["no default"]) and added < set(names["runtime=60"])
sys.exit(not (same and ratio["runtime=60"] > 1.08 * ratio["all three"]))
PYTHON
env/bin/python plan.py
