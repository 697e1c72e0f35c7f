"""The files of the code: those of the project, and the modules that the user's configuration names.

A job of the workflow alone knows which of them it has imported. It notes that beside its log (`write_note`),
and the record of the job takes it from there (`spider.provenance.recorder`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import resource
import subprocess
import sys
import time
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from spider.common import VERSION
from spider.common.files import digest, read_json, sha256, write_json
from spider.config.imports import allowed_imports

#: The checkout, or the folder that Spider is installed in.
ROOT = Path(__file__).resolve().parents[2]
#: Folders and files of the project that hold code, below `ROOT`.
CODE = ("spider", "kernels", "extras", "rules", "workflow", "Snakefile", "pyproject.toml")
SUFFIXES = (".py", ".smk", ".toml", "Snakefile")
#: The code that decides which bytes are downloaded, encoded and trained.
_PACKAGES = ("checkpoints", "config", "data", "evaluation", "model", "processes", "tokens", "training")
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


def imported() -> dict[str, str]:
    """Return the digest of each module of the project, or of the user, that this process has imported."""
    files = code_files()
    own = {str(ROOT / name): name for name in files}
    users = tuple(allowed_imports())
    modules = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if path in own:
            modules[own[path]] = files[own[path]]
        elif path and any(name == user or name.startswith(f"{user}.") for user in users):
            modules[path] = short_digest(Path(path))
    return dict(sorted(modules.items()))


@functools.cache
def git_commit() -> str | None:
    """Return the commit of the running code, with ``-dirty`` after edits; None outside of a git checkout."""
    if not (ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


#: Options of `git diff`, so that `git apply` reads the patch whatever the user has configured.
_PLAIN = ("--no-ext-diff", "--no-color", "--src-prefix=a/", "--dst-prefix=b/")


def packages() -> dict[str, str]:
    """Return the versions of Python and of all installed packages."""
    # The metadata are parsed at each access.
    found = {one["Name"]: one["Version"] for one in (package.metadata for package in distributions())}
    return {"Python": platform.python_version()} | found


def patch() -> str:
    """Return the changes of the code that are not committed, new files included; none outside of git."""
    code = [name for name in CODE if (ROOT / name).exists()]

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            return subprocess.run(command, capture_output=True, timeout=20).stdout.decode(errors="replace")
        return ""

    if not (ROOT / ".git").exists():
        return ""
    new = git("ls-files", "--others", "--exclude-standard", "--", *code).splitlines()
    added = [git("diff", "--no-index", *_PLAIN, "/dev/null", name) for name in new if name.endswith(SUFFIXES)]
    return "".join([git("diff", "HEAD", "--binary", *_PLAIN, "--", *code), *added])


@functools.cache
def processor() -> str:
    """Return the name of the processor, such as ``AMD EPYC 9R14``."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def write_note(log: Path, results: Path) -> None:
    """Write what this process knows of its job beside its log: processor, commit, code and cost.

    Jobs that imported the same modules share the file in ``code`` that lists them.
    """
    made: dict[str, Any] = {"version": VERSION, "commit": git_commit(), "modules": imported()}
    if not (path := results / "code" / f"{digest(made)}.json").exists():
        write_json(path, made)
    noted = {"code": digest(made), "commit": made["commit"], "processor": processor(), "time": time.time()}
    write_json(note_of(log), noted | _used())


def _used() -> dict[str, float]:
    """Return the processor seconds and the peak memory of this process and of those that it started.

    Nothing if it is one of several that train together, because it knows nothing of the others.
    """
    if os.environ.get("WORLD_SIZE", "") not in ("", "1"):
        return {}
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(one.ru_utime + one.ru_stime for one in used)
    return {"cpu_seconds": round(seconds, 2), "peak_rss_mb": max(one.ru_maxrss for one in used) / 1024}


def note_of(log: Path) -> Path:
    """Return the path of the note of the job with this log."""
    return log.with_suffix(".json")


def read_note(log: Path, since: float) -> dict[str, Any] | None:
    """Return the note of a job that began at a time, without the time; None if it left none."""
    with contextlib.suppress(ValueError, KeyError):
        noted: dict[str, Any] = read_json(note_of(log))
        if noted.pop("time") >= since - 1:
            return noted
    return None
