"""Measure the source code that a process needs to read a compressed model and predict with it.

A fresh process reads the file, predicts once and prints which modules of this project it imported. Libraries
are not counted, like the C library of any decompressor. For a model that is not yet trained, the process
builds one instead.
"""

from __future__ import annotations

import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

from spider.config.imports import allowed_imports

_ALLOW = """
import json, sys
from spider.config.imports import allow_import
for family in json.loads(sys.argv[2]):
    allow_import(family)
"""
_READ = """
from pathlib import Path
import torch
from spider.checkpoints.compress.format import read
model = read(Path(sys.argv[1])).model()
model(torch.zeros(1, 8, dtype=torch.long))
"""
_BUILD = """
import torch
import spider.checkpoints.compress.format
from spider.config.model import family_block
from spider.model import build_model
with torch.device("meta"):
    model = build_model(family_block(json.loads(sys.argv[1])))
"""
_LIST = """
ours = {"spider", "kernels", model.config.family.partition(".")[0]}
loaded = {name: getattr(m, "__file__", None) for name, m in sys.modules.items()}
print(json.dumps({name: file for name, file in loaded.items() if file and name.partition(".")[0] in ours}))
"""


def needed(path: Path) -> dict[str, Path]:
    """Return the modules that reading the file at ``path`` imports: the path of each, by name."""
    return _imported(_READ, str(path.resolve()))


def needed_by(config: str) -> dict[str, Path]:
    """Return the modules that building a model of this configuration (JSON) imports."""
    return _imported(_BUILD, config)


def _imported(program: str, argument: str) -> dict[str, Path]:
    root = str(Path(__file__).parents[3])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.run(
        [sys.executable, "-c", _ALLOW + program + _LIST, argument, json.dumps(allowed_imports())],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    if process.returncode:
        raise ValueError(f"a fresh process cannot read {argument}:\n{process.stderr.strip()}")
    found = json.loads(process.stdout.splitlines()[-1])
    return {name: Path(found[name]) for name in sorted(found)}


def size(modules: dict[str, Path]) -> int:
    """Return the size of the modules' concatenated source, packed by the strongest preset of xz."""
    source = b"".join(path.read_bytes() for path in modules.values())
    return len(lzma.compress(source, preset=9 | lzma.PRESET_EXTREME))
