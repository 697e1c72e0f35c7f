"""The display of a run reads the logs of its jobs, and estimates the time that is left."""

import logging
import time

import pytest

from spider.common.formatting import Pace
from spider.workflow.progress import _Job


@pytest.fixture
def job(tmp_path):
    """Return a job that began 100 seconds ago, with an empty log."""
    (tmp_path / "log").touch()
    made = _Job("train small/main", tmp_path / "log")
    made.began -= 100
    return made


def write(job, *lines):
    with open(job.log, "a") as file:
        file.writelines(f"12:00:00 train: {line}" for line in lines)


def test_a_job_shows_its_newest_whole_line_and_each_warning_once(job):
    write(job, "kernels: torch\n", "warning: damaged checkpoint\n", "step 10/110 | epoch 1 | bpb 2.5")
    assert job.follow() == ["damaged checkpoint"] and job.doing == "kernels: torch"
    write_rest = "  loss 1.7 | ram 1 MB\n"
    with open(job.log, "a") as file:
        file.write(write_rest)
    assert job.follow() == [] and job.doing == "step 10/110, bpb 2.5"
    write(job, "checkpoint saved: results/step-10\n")
    job.follow()
    assert job.doing == "step 10/110, bpb 2.5"


def test_the_log_of_an_earlier_attempt_is_not_read(job):
    write(job, "warning: of the attempt before\n")
    job.began_at = time.time() + 10
    assert job.follow() == [] and not job.doing


def test_steps_per_second_give_the_time_left_of_a_training(job):
    write(job, "scored 500 of 1,000 ids\n", "step 10/110 | bpb 2.5\n")
    job.follow()
    assert job.left() == 0 and not job.remaining(), "one line gives no speed"
    job.first = (time.monotonic() - 50, 10, 110)
    write(job, "step 60/110 | bpb 2.4\n")
    job.follow()
    assert job.left() == pytest.approx(50, abs=2)
    assert job.doing == "step 60/110, bpb 2.4" and job.remaining() in ("49 s left", "50 s left")


def test_a_loop_is_logged_at_most_every_five_seconds(caplog):
    caplog.set_level(logging.INFO)
    pace = Pace("read {done} of {total} documents", 10_000)
    pace(1)
    pace.logged -= 5
    pace(2_000)
    pace(3_000)
    assert caplog.messages == ["read 2,000 of 10,000 documents"]
