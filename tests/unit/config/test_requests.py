"""Jobs that read all of a text request memory and time by its size."""

import re
from pathlib import Path

import pytest

from spider.config import load_config
from spider.config.requests import Requests

RUN = {"data": "web", "model": "tiny", "stages": [{"name": "main", "max_steps": 1}]}


@pytest.mark.parametrize("cleaning", [{"exact": True}, {"exact": True, "near": 0.8}])
def test_cleaning_requests_memory_by_the_signatures_of_all_parts(tmp_path, cleaning):
    files = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    web = {"source": {"kind": "local", "files": files}, "cleaning": cleaning}
    requests = Requests(load_config({"datasets": {"web": web}, "runs": {"r": RUN}}), tmp_path)
    folder = tmp_path / "cleaning/web/signatures"
    folder.mkdir(parents=True)
    asked = {}
    for size in (1 << 30, 1 << 34):
        for part in ("000", "001"):
            with open(folder / f"{part}.parquet", "wb") as file:
                file.truncate(size)
        asked[size] = [requests.buckets("web"), requests.dropping("web")]
    for small, large in zip(*asked.values(), strict=True):
        assert 10 < large.mem_mb / small.mem_mb < 16 and 2 < large.minutes / small.minutes < 16


def test_an_index_of_more_text_has_more_threads_and_time(tmp_path):
    raw = tmp_path / "raw/web/000.parquet"
    raw.parent.mkdir(parents=True)
    web = {"source": {"kind": "local", "files": [str(raw)]}}
    requests = Requests(load_config({"datasets": {"web": web}, "runs": {"r": RUN}}), tmp_path)
    asked = []
    for size in (1 << 20, 1 << 37):
        raw.unlink(missing_ok=True)
        with open(raw, "wb") as file:
            file.truncate(size)
        asked.append(requests.index("web"))
    assert asked[0] == (1, 30) and asked[1][0] == 8 and asked[1][1] > 40


def asked(tmp_path, size, **changed):
    """Return the requests for a dataset of two parts of so many bytes each, by job."""
    files = [tmp_path / f"{name}.parquet" for name in "ab"]
    for path in files:
        with open(path, "wb") as file:
            file.truncate(size)
    web = {"source": {"kind": "local", "files": [*map(str, files)]}, "tokenizer": "bpe", "validation": 0.01}
    web |= {"cleaning": {"near": 0.8, "decontaminate": True}} | changed
    run = RUN | {"model": "gpt-cpu"}
    tokenizers = {"bpe": {"data": "web", "max_bytes": 2_000_000_000}}
    config = {"datasets": {"web": web}, "tokenizers": tokenizers, "runs": {"r": run}}
    requests = Requests(load_config(config), tmp_path)
    item = str(files[0])
    rules = ("download", "signatures", "pairs", "held_out", "contaminated", "encode")
    found = {rule: requests.of_part(rule, "web", "000", item) for rule in rules}
    return found | {"protect": requests.protecting("web"), "tokenizer": requests.learning("bpe")}


def test_jobs_that_read_a_part_request_time_and_memory_by_its_size(tmp_path):
    small, large = asked(tmp_path, 1 << 24), asked(tmp_path, 1 << 32)
    for job, request in large.items():
        assert request.minutes > small[job].minutes >= 30, job
        assert job == "download" or request.mem_mb > 1.2 * small[job].mem_mb >= 1000, job
    assert large["pairs"].mem_mb < 30_000, "the text that is compared at a time is bounded"
    in_bytes = asked(tmp_path, 1 << 32, tokenizer=None)["encode"]
    assert 30 < in_bytes.minutes < large["encode"].minutes, "ids of a tokenizer take longer"
    (tmp_path / "cleaning/web").mkdir(parents=True)
    with open(tmp_path / "cleaning/web/protected.parquet", "wb") as file:
        file.truncate(1 << 28)
    known = asked(tmp_path, 1 << 24)
    assert known["contaminated"].mem_mb > 10 * small["contaminated"].mem_mb, "protected text is in memory"


def test_the_sizes_of_a_thousand_parts_are_added_once(tmp_path, monkeypatch):
    """Each of the jobs that compare a part with held-out text asks for the size of all parts."""
    estimated = []
    one = Requests._estimated
    monkeypatch.setattr(Requests, "_estimated", lambda *given: estimated.append(1) or one(*given))
    web = {"source": {"kind": "hub", "repo": "x/y", "revision": "r", "files": ["a.parquet"], "take": "4 TB"}}
    web["cleaning"] = {"decontaminate": True}
    requests = Requests(load_config({"datasets": {"web": web}, "runs": {"r": RUN}}), tmp_path)
    parts = requests.config.parts("web")
    assert len(parts) == 1000
    for part, item in parts.items():
        requests.of_part("contaminated", "web", part, item)
    assert len(estimated) == 2 * len(parts), "for itself, and all once"


def test_a_part_of_unknown_size_is_given_four_hours(tmp_path):
    hub = {"kind": "hub", "repo": "x/y", "revision": "r", "files": ["a.parquet"]}
    minutes = []
    for source in (hub, hub | {"take": "40 MB"}, hub | {"take": "4 GB"}):
        requests = Requests(
            load_config({"datasets": {"web": {"source": source}}, "runs": {"r": RUN}}), tmp_path
        )
        item = requests.config.parts("web")["000"]
        minutes.append(requests.of_part("download", "web", "000", item).minutes)
    assert minutes[0] == 240 and 30 <= minutes[1] < minutes[2] < 240


def test_pages_request_memory_by_their_stages_and_parts(tmp_path):
    def shown(stages, take):
        run = RUN | {"stages": [{"name": f"s{i}", "max_steps": 1} for i in range(stages)]}
        web = {"kind": "hub", "repo": "x/y", "revision": "r", "files": ["a.parquet"], "take": take}
        config = load_config({"datasets": {"web": {"source": web}}, "runs": {"r": run, "other": RUN}})
        return Requests(config, tmp_path).showing("r", "other").mem_mb

    assert shown(1, "4 GB") < shown(40, "4 GB") < shown(40, "20 TB")


def test_no_rule_requests_a_fixed_amount_but_for_compressors():
    """Compressors read what `training_bytes` of the evaluation allows."""
    rules = Path(__file__).parents[3].glob("rules/*.smk")
    fixed = {
        (path.stem, line.strip())
        for path in rules
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"(mem_mb|runtime)=growing\(\d", line)
    }
    assert fixed == {("data", "runtime=growing(240),"), ("evaluate", "mem_mb=growing(3000),")}
