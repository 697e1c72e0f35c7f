"""The files of the code: those of the project, and the modules that the user's configuration names."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path

from spider.config.imports import allowed_imports
from spider.files import digest, sha256

#: The checkout, or the folder that Spider is installed in.
ROOT = Path(__file__).resolve().parents[1]
#: Folders and files of the project that hold code, below `ROOT`.
CODE = ("spider", "kernels", "rules", "workflow", "Snakefile", "pyproject.toml")
SUFFIXES = (".py", ".smk", ".toml", "Snakefile")
#: The code that decides which bytes are downloaded, encoded and trained.
_PACKAGES = (
    "checkpoints", "cleaning", "config", "data", "evaluation", "model",
    "ngram", "processes", "sources", "tokens", "training",
)  # fmt: skip
_DECIDING = ("kernels/", *(f"spider/{name}/" for name in _PACKAGES))


@functools.cache
def code_files() -> dict[str, str]:
    """Return the digest of each file of the project's code, as it is at the first call."""
    files = [path for name in CODE for path in [ROOT / name, *(ROOT / name).rglob("*")]]
    found = {path.relative_to(ROOT).as_posix(): path for path in files if path.name.endswith(SUFFIXES)}
    return {name: short_digest(path) for name, path in sorted(found.items()) if path.is_file()}


def short_digest(path: Path) -> str:
    """Return the first 16 digits of a file's SHA-256."""
    return sha256(path)[:16]


def deciding_code() -> str:
    """Return the digest of the code that decides the bytes of shards and weights, with the user's modules."""
    own = {name: one for name, one in code_files().items() if name.startswith(_DECIDING)}
    for name in allowed_imports():
        spec = find_spec(name)
        folders = (spec and spec.submodule_search_locations) or []
        files = [path for folder in folders for path in sorted(Path(folder).rglob("*.py"))]
        if spec and spec.origin and not files:
            files = [Path(spec.origin)]
        own |= {f"{name}:{number}": short_digest(path) for number, path in enumerate(files)}
    return digest(own)
