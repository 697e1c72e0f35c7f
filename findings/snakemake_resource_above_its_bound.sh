#!/usr/bin/env bash
# Snakemake starts a job that requests more of a resource than --resources allows, with the smaller number.
#
# Guess:     a job with `resources: gpu=2` under `--resources gpu=1` never starts, or Snakemake ends with an error.
# Behaviour: it starts at once, and its `resources.gpu` is 1. With `--resources gpu=0` it starts with 0. Nothing is
#            said. Threads are documented to be scaled down; a job that needs two GPUs cannot run on none.
# Seen with: snakemake 9.27.1 on Python 3.11:
#            bound 1: the job has 1
#            bound 0: the job has 0
# Exits with 1 if this has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet --disable-pip-version-check snakemake==9.27.1
cat > Snakefile <<'SNAKEFILE'
rule job:
    output: "given.txt"
    resources: gpu=2
    shell: "echo {resources.gpu} > {output}"
SNAKEFILE
env/bin/snakemake --version
changed=0
for bound in 1 0; do
    rm -f given.txt
    env/bin/snakemake --cores 1 --resources "gpu=$bound" --quiet all || true
    given=$(cat given.txt 2> /dev/null || echo nothing)
    echo "bound $bound: the job has $given"
    [ "$given" = "$bound" ] || changed=1
done
exit $changed
