"""Only one process trains in a folder at a time, and changed settings are named."""

import logging
import subprocess

import pytest

from spider.checkpoints.save import differences, wait_for

HOLDER = """
import os, sys
from pathlib import Path
from spider.checkpoints.save import hold
folder = Path(sys.argv[1])
with hold(folder):
    print(os.getpid(), flush=True)
    input()
    (folder / "ended").touch()
"""


def test_waiting_for_a_folder_ends_with_its_trainer(tmp_path, start_python, caplog):
    wait_for(tmp_path / "new")
    assert not list(tmp_path.iterdir()), "an unused folder needs no waiting and no file"
    holder = start_python(HOLDER, tmp_path, stdin=subprocess.PIPE)
    number = int(holder.stdout.readline())

    def end_holder(record):
        holder.stdin.write("\n")
        holder.stdin.flush()
        return True

    log = logging.getLogger("spider.checkpoints.save")
    log.addFilter(end_holder)
    try:
        wait_for(tmp_path)
    finally:
        log.removeFilter(end_holder)
    assert (tmp_path / "ended").exists()
    (message,) = caplog.messages
    assert f"process {number} on " in message and "waiting for it to end" in message


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ({"a": 1, "b": {"c": 2}}, {"b": {"c": 2}, "a": 1}, []),
        ({"b": {"c": {"d": 1}}, "e": 5}, {"b": {"c": {"d": 2}}, "e": 6}, ["b.c.d: 1 -> 2", "e: 5 -> 6"]),
        ({"a": 1}, {"b": 2}, ["a: 1 -> None", "b: None -> 2"]),
        # A block that is switched on or off is named as a whole.
        ({"moe": None}, {"moe": {"experts": 4}}, ["moe: None -> {'experts': 4}"]),
        ({"layers": [0, 1]}, {"layers": [0, 2]}, ["layers: [0, 1] -> [0, 2]"]),
    ],
)
def test_each_changed_setting_is_named_with_both_values(before, now, expected):
    assert differences(before, now, "model") == [f"model.{line}" for line in expected]
