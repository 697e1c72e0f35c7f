#!/usr/bin/env bash
# With `snakemake --sdm apptainer` a job has another home folder than the user: the one where Snakemake was started.
#
# Guess:     a job in an image has the user's home folder, because Apptainer mounts it by default. So it finds the token of the
#            hub and the caches of Hugging Face, pip and torch there, as a job without an image does.
# Behaviour: Snakemake passes `--home` with the folder of the workflow. `$HOME` is that folder in every job, so a token that
#            `hf auth login` has stored is not found, and caches are written into the project (`.cache`), once for each project.
#            Variables such as HF_TOKEN and HF_HOME still reach the job.
# Seen with: snakemake 9.27.1, Python 3.11. A script stands in for Apptainer, which pip does not have. Apptainer 1.4.5 itself,
#            called with the same words, says the same folder for $HOME and hands HF_TOKEN on.
#            home work         <- where Snakemake was started; HOME was `user`
#            token given
# Exits with 1 if this has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet --disable-pip-version-check snakemake==9.27.1
mkdir bin work
cat > bin/apptainer <<'PROGRAM'
#!/bin/sh
if [ "$1" = --version ]; then echo apptainer version 1.4.5; exit; fi
while [ "$1" != bash ]; do
    case $1 in
        --home) shift; echo "home ${1#"$FOLDER"/}" >> "$FOLDER/seen.txt" ;;
    esac
    shift
done
exec "$@"
PROGRAM
chmod +x bin/apptainer
cd work
touch image.sif
cat > Snakefile <<'SNAKEFILE'
container: "image.sif"
rule result:
    output: "result.txt"
    shell: "echo token ${{HF_TOKEN}} > {output}"
SNAKEFILE
FOLDER=$folder HOME=$folder/user HF_TOKEN=given PATH=$folder/bin:$PATH \
    ../env/bin/snakemake --cores 1 --sdm apptainer --quiet all > ../log.txt 2>&1 || { cat ../log.txt; exit 1; }
cat result.txt >> ../seen.txt
cat ../seen.txt
diff ../seen.txt - <<'SEEN'
home work
token given
SEEN
