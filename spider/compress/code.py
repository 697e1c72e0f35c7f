"""The source that a process needs to read a pressed model and predict with it: what is counted with a file.

A fresh process reads the file, predicts once, and says which of our modules it imported. Those of libraries
are not counted, as a decompressor's C library is not.
"""

from __future__ import annotations

import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import spider

#: Read a file, predict, and list the modules that are ours.
_READ = """
import json, sys
from pathlib import Path
import torch
from spider.compress.artifact import read
pressed = read(Path(sys.argv[1]))
pressed.model()(torch.zeros(1, 8, dtype=torch.long))
ours = {"spider", "kernels", pressed.header["model"]["family"].partition(".")[0]}
loaded = {name: getattr(m, "__file__", None) for name, m in sys.modules.items()}
print(json.dumps({name: file for name, file in loaded.items() if file and name.partition(".")[0] in ours}))
"""


def needed(path: Path) -> dict[str, Path]:
    """The modules that reading the file at ``path`` imports, by name, and where their source lies."""
    root = str(Path(spider.__file__).parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", _READ, path.resolve()],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    if done.returncode:
        raise ValueError(f"{path}: a fresh process cannot read it:\n{done.stderr.strip()}")
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: Path(found[name]) for name in sorted(found)}


def size(modules: dict[str, Path]) -> int:
    """Bytes of their source, one behind the other, by xz at its strongest."""
    source = b"".join(path.read_bytes() for path in modules.values())
    return len(lzma.compress(source, preset=9 | lzma.PRESET_EXTREME))
