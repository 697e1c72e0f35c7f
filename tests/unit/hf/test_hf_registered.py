"""In processes of their own: our classes are known after ``import spider``, before or after transformers."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from spider.hf.announce import announce

#: By what each shows. That model and tokenizer then load, all other tests here show, and the last of these.
KNOWN = """
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
assert CONFIG_MAPPING["spider"].__name__ == "SpiderHFConfig"
assert "transformers.modeling_utils" not in sys.modules, "the model only as it is asked for"
"""
PROGRAMS = {
    "spider_first": """
import sys
import spider
assert not {"torch", "transformers", "numpy"} & sys.modules.keys()
before = [type(one).__name__ for one in sys.meta_path]
import transformers.models.auto.configuration_auto
assert before.count("_Watcher") == 1 and not any(type(one).__name__ == "_Watcher" for one in sys.meta_path)
"""
    + KNOWN,
    "transformers_first": "import sys; from transformers import AutoConfig; import spider" + KNOWN,
    "code_of_the_folder": """
import sys
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
sys.modules["spider"] = None  # as if it were not installed
try:
    AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)
except ImportError as error:
    assert "read by Spider with its extra `hf`, which is not installed here" in str(error), error
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
there, saved = ({file.name for file in Path(folder).iterdir()} for folder in sys.argv[1:])
assert there - {"README.md"} == saved, (there, saved)  # a card is of what was exported
assert type(AutoTokenizer.from_pretrained(sys.argv[2])) is type(tokenizer)
""",
}


@pytest.fixture(scope="module")
def running(exports, tmp_path_factory):
    """All three at a time: each imports torch and transformers."""
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


def test_a_transformers_that_is_too_old_is_left_alone(monkeypatch, caplog):
    import transformers.models.auto.configuration_auto  # noqa: F401

    monkeypatch.delitem(sys.modules, "spider.hf.registered", raising=False)
    monkeypatch.delitem(sys.modules, "spider.hf.configuration", raising=False)
    monkeypatch.setitem(sys.modules, "transformers.configuration_utils", None)
    with caplog.at_level(logging.WARNING):
        announce()
    assert "will not know Spider's models, they need its version 5" in caplog.text
