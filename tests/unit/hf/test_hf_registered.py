"""Transformers loads an exported folder after ``import spider.hf``, or by the code in the folder."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAMS = {
    "registered": """
import sys
import spider
assert not {"torch", "transformers", "numpy"} & sys.modules.keys()
import spider.hf
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert type(AutoConfig.from_pretrained(sys.argv[1])).__name__ == "SpiderHFConfig"
assert model(**tokenizer("a", return_tensors="pt")).logits.shape[-1] == len(tokenizer)
""",
    "code_of_the_folder": """
import sys
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
sys.modules["spider"] = None  # as if it were not installed
try:
    AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)
except ImportError as error:
    assert "needs Spider with its extra `hf`, which is not installed here" in str(error), error
else:
    raise AssertionError
del sys.modules["spider"]
try:
    AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=False)
except ValueError as error:
    assert "trust_remote_code" in str(error), error
else:
    raise AssertionError
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
assert model(**tokenizer("a", return_tensors="pt")).logits.shape[-1] == len(tokenizer)
model.save_pretrained(sys.argv[2])
tokenizer.save_pretrained(sys.argv[2])
from pathlib import Path
exported, saved = ({file.name for file in Path(folder).iterdir()} for folder in sys.argv[1:])
assert exported - {"README.md"} == saved, (exported, saved)  # only an export writes a card
assert type(AutoTokenizer.from_pretrained(sys.argv[2])) is type(tokenizer)
""",
}


@pytest.fixture(scope="module")
def running(exports, tmp_path_factory):
    """Start both programs at once, because each imports torch and transformers."""
    scratch = tmp_path_factory.mktemp("scratch")
    env = os.environ | {"HF_HOME": str(scratch / "hf"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.getcwd()}
    processes = {
        name: subprocess.Popen(
            [sys.executable, "-c", program, str(exports["bpe"][1]), str(scratch / name)],
            env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for name, program in PROGRAMS.items()
    }  # fmt: skip
    yield processes
    for process in processes.values():
        process.kill()


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_export_loads(running, name):
    output, _ = running[name].communicate(timeout=300)
    assert running[name].returncode == 0, output
