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


class Handler(logging.Handler):
    """Call a function for each record that is logged."""

    def __init__(self, function):
        super().__init__()
        self.emit = function


def test_waiting_for_a_folder_ends_with_its_trainer(tmp_path, start_python):
    holder = start_python(HOLDER, tmp_path, stdin=subprocess.PIPE)
    number = int(holder.stdout.readline())
    messages = []

    def end_holder(record):
        messages.append(record.getMessage())
        holder.stdin.write("\n")
        holder.stdin.flush()

    log, handler = logging.getLogger("spider.checkpoints.save"), Handler(end_holder)
    log.addHandler(handler)
    try:
        wait_for(tmp_path)
    finally:
        log.removeHandler(handler)
    assert (tmp_path / "ended").exists()
    (message,) = messages
    assert f"process {number} on " in message and "waiting for it to end" in message


def test_waiting_for_an_unused_folder_ends_at_once_and_writes_no_file(tmp_path):
    wait_for(tmp_path / "new")
    wait_for(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ({"a": 1, "b": {"c": 2}}, {"b": {"c": 2}, "a": 1}, []),
        ({"b": {"c": 2, "d": 3}}, {"b": {"c": 4, "d": 3}}, ["b.c: 2 -> 4"]),
        ({"b": {"c": {"d": 1}}, "e": 5}, {"b": {"c": {"d": 2}}, "e": 6}, ["b.c.d: 1 -> 2", "e: 5 -> 6"]),
        ({"a": 1}, {"b": 2}, ["a: 1 -> None", "b: None -> 2"]),
        # A block that is switched on or off is named as a whole.
        ({"moe": {"experts": 4}}, {"moe": None}, ["moe: {'experts': 4} -> None"]),
        ({"moe": None}, {"moe": {"experts": 4}}, ["moe: None -> {'experts': 4}"]),
        ({"layers": [0, 1]}, {"layers": [0, 2]}, ["layers: [0, 1] -> [0, 2]"]),
    ],
)
def test_each_changed_setting_is_named_with_both_values(before, now, expected):
    assert differences(before, now) == expected
    assert differences(before, now, "model") == [f"model.{line}" for line in expected]
