"""One process reuses what another one compiled; each has its own cache folder."""

import json
import os
import subprocess
import time

import pytest

from spider.common.errors import TrainingError
from spider.training import compilation, loop
from spider.training.stage import train
from tests.forkserver import python

# The function leaves and enters autocast, as the model's router does, and has a backward pass.
COMPILE = """
import json, sys
from pathlib import Path
import torch
from spider.training import compilation
from torch._dynamo.utils import counters

@torch.compile
def step(x, w):
    y = x @ w
    with torch.autocast("cpu", enabled=False):
        z = x.float() @ w.float()
    return (torch.nn.functional.silu(y) + z).square().mean()

def run():
    x, w = torch.ones(16, 16), torch.ones(16, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        step(x, w).backward()

archive = Path(sys.argv[2])
if sys.argv[1] == "keep":
    with compilation.saved_to(archive):
        run()
else:
    compilation.unpack(archive)
    run()
print(json.dumps({"graphs": counters["inductor"], "steps": counters["aot_autograd"]}))
"""


@pytest.fixture
def compile_in(tmp_path):
    """Return a function that compiles in another process with a cache folder and returns torch's counters."""

    def begin(what, folder):
        command = [python(), "-c", COMPILE, what, str(tmp_path / "a.cache")]
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / folder)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    return begin


@pytest.mark.inductor
def test_another_process_reuses_the_compiled_code(compile_in, tmp_path):
    cold = compile_in("keep", "cold")
    assert cold["graphs"]["fxgraph_cache_miss"] == 2 and cold["steps"]["autograd_cache_saved"] == 1
    began = time.time()
    warm = compile_in("take", "warm")
    assert warm["steps"]["autograd_cache_hit"] == 1 and "fxgraph_cache_miss" not in warm["graphs"]
    libraries = list((tmp_path / "warm").rglob("*.so"))
    assert libraries and all(path.stat().st_mtime < began for path in libraries)


def test_a_compiler_that_fails_is_named_with_the_remedy(tmp_path, make_spec, shards, monkeypatch):
    from torch._dynamo.exc import BackendCompilerFailed

    def fail(*given, **options):
        raise BackendCompilerFailed(lambda: None, RuntimeError("PassManager::run failed"), None)

    monkeypatch.setattr(loop.Trainer, "_forward_backward", fail)
    with pytest.raises(TrainingError, match=r"cannot compile this model here .*PassManager.*compile: false"):
        train(make_spec(), tmp_path, shards)
    assert compilation.compiler_failed(RuntimeError("other")) is None
