#!/usr/bin/env bash
# With Snakemake 9.27 a job ignores its own changed params and files while a job runs that makes an `ancient` input of it.
#
# Guess:     `ancient(FILE)` ignores the time of this one file. Another reason to run the job, such as changed params or
#            a newer input that is not ancient, still counts.
# Behaviour: if the job that makes FILE has to run, Snakemake looks for no reason of the jobs after it. It expects them to
#            run because of FILE, and then they do not, because FILE is ancient. So the invocation succeeds, and the result is
#            that of the old params and of the old other input. The next invocation runs the job.
# Seen with: snakemake 9.27.1, Python 3.11; the result holds the word of the params, the ancient list and the other file:
#            params changed             new old-list a
#            list and params changed    new old-list a       <- no error, but the params, list and file of before
#            the same again             newest new-list b
# Exits with 1 if this has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet --disable-pip-version-check snakemake==9.27.1
cat > Snakefile <<'SNAKEFILE'
rule use:
    input: ancient("list.txt"), "other.txt"
    output: "result.txt"
    params: word=config["word"]
    shell: "echo {params.word} $(cat {input[0]}) $(cat {input[1]}) > {output}"
rule make_list:
    input: "source.txt"
    output: "list.txt"
    shell: "cp {input} {output}"
SNAKEFILE
run() { env/bin/snakemake --cores 1 --quiet all --config word="$1" > log.txt 2>&1 || { cat log.txt; exit 1; }; }
echo old-list > source.txt; echo a > other.txt
run old
for step in "params changed:new" "list and params changed:newest" "the same again:newest"; do
    word=${step#*:}
    case $step in list*) sleep 1.1; echo new-list > source.txt; echo b > other.txt ;; esac
    run "$word"
    printf '%-26s %s\n' "${step%:*}" "$(cat result.txt)" | tee -a seen.txt
done
diff seen.txt - <<'SEEN'
params changed             new old-list a
list and params changed    new old-list a
the same again             newest new-list b
SEEN
