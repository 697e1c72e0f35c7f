import json

import pytest
import torch

from spider.training.metrics import MetricsLog
from spider.training.state import Means


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_logged_rows_are_not_written_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for steps in ((10, 20), (20, 30)):
        log = MetricsLog(path)
        for step in steps:
            log.write(step, {"train/loss": 1.0})
    assert steps_in(path) == [10, 20, 30]


@pytest.mark.parametrize("tail", [b'{"step": 30, "ti', b'{"step": 30}', b"\0\0\0\0"])
def test_a_torn_last_line_is_dropped_and_written_again(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write(10, {"train/loss": 1.0})
    log.write(20, {"train/loss": 0.5})
    path.write_bytes(path.read_bytes() + tail)
    log = MetricsLog(path)
    assert log.last == 20
    log.write(30, {"train/loss": 0.25})
    assert steps_in(path) == [10, 20, 30]


FINITE = torch.tensor(True)


def test_means_are_exact_through_a_checkpoint():
    torch.manual_seed(0)
    values = [{"loss": torch.randn(()), "depth": torch.randn((), dtype=torch.float64)} for _ in range(7)]
    whole, first = Means(), Means()
    for value in values:
        whole.add(value, FINITE)
    for value in values[:3]:
        first.add(value, FINITE)
    rest = Means.restore(json.loads(json.dumps(first.plain())), torch.device("cpu"))
    for value in values[3:]:
        rest.add(value, FINITE)
    rest.add({"loss": torch.tensor(torch.nan), "depth": torch.tensor(1.0)}, ~FINITE)
    assert rest.read() == whole.read()
    assert whole.read()["loss"] == pytest.approx(sum(v["loss"].item() for v in values) / 7)
    assert Means().read() == {}
    skipped = Means()
    skipped.add({"loss": torch.tensor(torch.inf)}, ~FINITE)
    assert skipped.read() == {} and skipped.plain()["count"] == 0
