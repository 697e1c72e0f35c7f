"""`spider audit` finds what twenty dishonest runs have done, and gives no alarm for twenty honest ones."""

from __future__ import annotations

import pytest

from extras.trust.tests.planted import CLEAN, FRAUDS, ROOT, audited, make, verdict

ALL = [*FRAUDS, *CLEAN]
assert (len(FRAUDS), len(CLEAN)) == (20, 20)
#: These share one small workflow.
NAMES = (
    "80% of validation documents trained on",
    "a hand-edited evaluation",
    "gpt on bytes",
)
FEW = [one for one in ALL if one.name in NAMES]


@pytest.mark.parametrize("planted", [one for one in ALL if one.code], ids=lambda one: one.name)
def test_the_code_that_a_planted_run_edits_is_there_once(planted):
    path, now, planted_code = planted.code
    source = (ROOT / path).read_text(encoding="utf-8")
    assert source.count(now) == 1
    compile(source.replace(now, planted_code), path, "exec")


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planted")
    make(folder, FEW)
    return folder


@pytest.mark.parametrize("planted", FEW, ids=lambda one: one.name)
def test_a_planted_run(few, planted):
    findings = audited(few, planted)
    right, line = verdict(planted, findings)
    assert right, (line, findings)


@pytest.fixture(scope="module")
def all_of_them(tmp_path_factory):
    folder = tmp_path_factory.mktemp("all-planted")
    make(folder, ALL)
    return folder


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("planted", ALL, ids=lambda one: one.name)
def test_one_of_forty_planted_runs(all_of_them, planted):
    findings = audited(all_of_them, planted)
    right, line = verdict(planted, findings)
    assert right, (line, findings)
