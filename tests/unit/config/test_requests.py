"""Jobs that read all of a text request memory and time by its size."""

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
        with open(raw, "wb") as file:
            file.truncate(size)
        asked.append(requests.index("web"))
    assert asked[0] == (1, 30) and asked[1][0] == 8 and asked[1][1] > 40
