"""Transformers loads an exported folder by the code in it, if Spider is installed."""

from __future__ import annotations

import os
import subprocess

from tests.forkserver import python

CODE_OF_THE_FOLDER = """
import sys
from pathlib import Path
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
sys.modules["spider"] = None  # as if it were not installed
missing = ImportError, "needs Spider with its extra `hf`, which is not installed here"
for trusted, (wrong, said) in ((True, missing), (False, (ValueError, "trust_remote_code"))):
    try:
        AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=trusted)
        raise AssertionError
    except wrong as error:
        assert said in str(error), error
    sys.modules.pop("spider", None)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
assert model(**tokenizer("a", return_tensors="pt")).logits.shape[-1] == len(tokenizer)
model.save_pretrained(sys.argv[2])
tokenizer.save_pretrained(sys.argv[2])
exported, saved = ({file.name for file in Path(folder).iterdir()} for folder in sys.argv[1:])
assert exported - {"README.md"} == saved, (exported, saved)  # only an export writes a card
"""


def test_an_export_loads_by_the_code_in_it(exports, tmp_path):
    env = os.environ | {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.getcwd()}
    command = [python(), "-c", CODE_OF_THE_FOLDER, str(exports["bpe"][1]), str(tmp_path / "saved")]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
