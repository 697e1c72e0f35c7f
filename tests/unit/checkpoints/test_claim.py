"""One trainer in a folder at a time, and the settings that differ from those that the folder began with."""

import logging
import subprocess

import pytest

from spider.checkpoints.claim import differences, wait_for

HOLDER = """
import sys
from pathlib import Path
from spider.checkpoints.claim import hold
folder = Path(sys.argv[1])
with hold(folder):
    print("held", flush=True)
    input()
    (folder / "ended").touch()
"""


class Answer(logging.Handler):
    """Call a function for each record that is logged."""

    def __init__(self, answer):
        super().__init__()
        self.emit = answer


def test_who_waits_for_a_folder_goes_on_after_its_trainer_has_ended(tmp_path, start_python):
    holder = start_python(HOLDER, tmp_path, stdin=subprocess.PIPE)
    assert holder.stdout.readline() == "held\n"
    said = []

    def let_it_end(record):
        said.append(record.getMessage())
        holder.stdin.write("\n")
        holder.stdin.flush()

    log, handler = logging.getLogger("spider.checkpoints.claim"), Answer(let_it_end)
    log.addHandler(handler)
    try:
        wait_for(tmp_path)
    finally:
        log.removeHandler(handler)
    assert (tmp_path / "ended").exists()
    assert len(said) == 1 and f"process {holder.pid} on " in said[0] and "waiting for it to end" in said[0]


def test_nothing_is_waited_for_nor_made_where_nobody_has_trained(tmp_path):
    wait_for(tmp_path / "new")
    wait_for(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ({"a": 1, "b": {"c": 2}}, {"b": {"c": 2}, "a": 1}, []),
        ({"b": {"c": 2, "d": 3}}, {"b": {"c": 4, "d": 3}}, ["b.c: 2 -> 4"]),
        ({"b": {"c": {"d": 1}}, "e": 5}, {"b": {"c": {"d": 2}}, "e": 6}, ["b.c.d: 1 -> 2", "e: 5 -> 6"]),
        ({"a": 1}, {"b": 2}, ["a: 1 -> None", "b: None -> 2"]),
        # A block that is switched on or off is told whole: there is nothing to compare it with.
        ({"moe": {"experts": 4}}, {"moe": None}, ["moe: {'experts': 4} -> None"]),
        ({"moe": None}, {"moe": {"experts": 4}}, ["moe: None -> {'experts': 4}"]),
        ({"layers": [0, 1]}, {"layers": [0, 2]}, ["layers: [0, 1] -> [0, 2]"]),
    ],
)
def test_each_setting_that_differs_is_named_with_both_values(before, now, told):
    assert differences(before, now) == told
    under = [f"model.{one}" for one in told]
    assert differences(before, now, "model") == under
