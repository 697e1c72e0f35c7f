#!/usr/bin/env bash
# Snakemake forgets that a rerun failed: the next call says "Nothing to be done", and its target is of old settings.
#
# Guess:     a job runs again because its params have changed, and fails. The next call runs it again, or fails.
# Behaviour: Snakemake removes the output of the failed job, and records the job as finished with its new params. A
#            file that was made from the lost output is still there, so the next call ends with status 0 and does
#            nothing. The file has the content of the old params, whatever the configuration says now.
# Seen with: snakemake 9.27.1 on Python 3.11:
#            setting=good: status 0, b.txt has good
#            setting=bad: status 1, b.txt has good
#            setting=bad: status 0, b.txt has good
# Exits with 1 if this has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet --disable-pip-version-check snakemake==9.27.1
cat > Snakefile <<'SNAKEFILE'
rule b:
    input: "a.txt"
    output: "b.txt"
    shell: "cp {input} {output}"

rule a:
    output: "a.txt"
    params: setting=config["setting"]
    shell: "test {params.setting} = good && echo {params.setting} > {output}"
SNAKEFILE
env/bin/snakemake --version
seen=""
for setting in good bad bad; do
    status=0
    env/bin/snakemake b.txt --cores 1 --quiet all --config setting="$setting" > /dev/null 2>&1 || status=$?
    line="setting=$setting: status $status, b.txt has $(cat b.txt)"
    echo "$line"
    seen="$seen$line;"
done
expected="setting=good: status 0, b.txt has good;setting=bad: status 1, b.txt has good;"
[ "$seen" = "${expected}setting=bad: status 0, b.txt has good;" ]
