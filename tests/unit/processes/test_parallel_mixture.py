"""Three, one, two and four processes read a mixture as one process does, also when they are killed."""

from __future__ import annotations

import numpy as np
import pytest

from spider.training.loop import Trainer
from spider.training.stage import train
from tests.unit.processes.test_parallel import job, run_together
from tests.unit.training.disturb import Stop, crash_at
from tests.unit.training.outcomes import outcome
from tests.unit.training.test_mixed_stages import SWITCHED, folders, mix_spec  # noqa: F401 (fixtures)


def test_processes_that_come_go_and_are_killed_read_one_sequence(tmp_path, mix_spec, folders):  # noqa: F811
    settings = {"packing": "best_fit", "micro_batch": 12, "grad_accum": 1, "ckpt_every": 1, "max_steps": 8}
    spec = mix_spec(more=SWITCHED, **settings)

    def together(processes, *names, **more):
        jobs = [job(tmp_path, spec, name, "ddp", folders, record=False, **more) for name in names]
        return run_together(processes, jobs, tmp_path, fails="kill" in more)

    together(3, "killed", kill=1)  # its next process starts between the two steps of the other training
    together(3, "killed", "whole", stop=2)
    for name in ("killed", "whole"):
        with pytest.raises(Stop):
            train(spec, tmp_path / name, folders, on_step=crash_at(4))
    together(2, "killed", "whole", stop=6)
    together(4, "killed", "whole")
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")

    alone = Trainer(spec, tmp_path, folders, {"data_digest": ""}).loader
    expected = np.stack([next(alone).rows_BT1 for _ in range(8)])
    alone.close()
    for processes, steps in ((3, slice(0, 2)), (2, slice(4, 6)), (4, slice(6, 8))):
        shares = [np.load(tmp_path / f"whole/seen-{processes}-{rank}.npy") for rank in range(processes)]
        assert np.array_equal(np.concatenate(shares, axis=1), expected[steps])
        for rank in range(processes):
            read = [(tmp_path / name / f"read-{processes}-{rank}.txt") for name in ("killed", "whole")]
            killed, whole = (set(one.read_text().splitlines()) for one in read)
            assert killed == whole and len(whole) == 2
