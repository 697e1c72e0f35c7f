"""A scheduler's refusal becomes the name of the setting to change."""

import pytest

from spider.common.cluster import remedies


@pytest.mark.parametrize(
    ("said", "setting"),
    [
        ("sbatch: error: invalid partition specified: fast", "no partition fast: name those of your site in"),
        ("Batch job submission failed: Invalid account or account/partition combination", "set account"),
        ("sbatch: error: Invalid generic resource (gres) specification", "set max_gpu of the partitions in"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "set longest"),
        ("sbatch: error: Memory specification can not be satisfied", "set threads, mem_mb, gpus and nodes"),
        ("/bin/sh: 1: sbatch: not found", "on a login node"),
        ("[Errno 2] No such file or directory: 'sacct'", "on a login node"),
        ("Batch job submission failed: Unable to contact slurm controller", "as soon as `sinfo` answers"),
    ],
)
def test_a_refusal_names_the_setting_to_change(tmp_path, said, setting):
    log = tmp_path / "snakemake.log"
    log.write_text(f"Error in rule train:\n    message: SLURM sbatch failed. {said}'.\n" * 3)
    (advice,) = remedies([str(log)])
    assert setting in advice


def test_any_other_failure_is_left_to_speak_for_itself(tmp_path):
    log = tmp_path / "snakemake.log"
    log.write_text("Error in rule train: CalledProcessError, exit status 1")
    assert remedies([str(log)]) == []
