"""Record the code and the environment that made something, in files that are named by their content.

    tracking/code/{digest}.json           the commit, the patch, all of the code, and the modules of one job
    tracking/code/{digest}.patch          changes that are not committed, as `git apply` reads them
    tracking/code/{digest}.requirements   the installed packages

Jobs that imported the same modules share a file. Code is the Python and Snakemake files of the project, and
the modules that the user's configuration names. Data, configurations and results are not part of it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import platform
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from spider.codefiles import CODE, ROOT, SUFFIXES, code_files, short_digest
from spider.config.imports import allowed_imports
from spider.files import digest, write_bytes
from spider.tracking.records import git_commit
from spider.tracking.spool import redact
from spider.version import VERSION

log = logging.getLogger(__name__)

#: Options of `git diff`, so that `git apply` reads the patch whatever the user has configured.
_PLAIN = ("--no-ext-diff", "--no-color", "--src-prefix=a/", "--dst-prefix=b/")


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
def patch() -> str | None:
    """Return the changes of the code that are not committed, new files included; None without a checkout."""
    if not (ROOT / ".git").exists():
        return None
    code = [name for name in CODE if (ROOT / name).exists()]
    changed = _git("diff", "HEAD", "--binary", *_PLAIN, "--", *code)
    new = _git("ls-files", "--others", "--exclude-standard", "--", *code).splitlines()
    added = [
        _git("diff", "--no-index", *_PLAIN, "/dev/null", name) for name in new if name.endswith(SUFFIXES)
    ]
    return "".join([changed, *added])


def _git(*words: str) -> str:
    """Return what a command of git prints in the checkout, or an empty text if it fails."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="surrogateescape")


def record(results: Path) -> str:
    """Write the code that this process has imported into the results folder, and return its digest.

    A patch is written without secrets.
    """
    folder = results / "tracking" / "code"
    text = redact(patch() or "", settings=False)
    changes = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16] if text else None
    if changes:
        _write_once(folder / f"{changes}.patch", text)
    made: dict[str, Any] = {"version": VERSION, "commit": git_commit(), "tree": digest(code_files())}
    if changes:
        made |= {"patch": changes, "redacted": text != patch()}
    made["modules"] = imported()
    _write_once(folder / f"{digest(made)}.json", json.dumps(made, indent=2) + "\n")
    return digest(made)


def packages() -> dict[str, str]:
    """Return the version of Python and of each installed package."""
    return {"Python": platform.python_version()} | {one.name: one.version for one in distributions()}


def record_environment(results: Path) -> str:
    """Write the list of installed packages into the results folder, and return its digest."""
    found = packages()
    python = found.pop("Python")
    lines = sorted((f"{name}=={version}" for name, version in found.items()), key=str.lower)
    text = "\n".join([f"# Python {python}", *lines]) + "\n"
    _write_once(results / "tracking" / "code" / f"{digest(text)}.requirements", text)
    return digest(text)


def _write_once(path: Path, text: str) -> None:
    """Write a file unless it exists. On a full or read-only disk it is lost, but the job continues."""
    if path.exists():
        return
    try:
        write_bytes(path, text.encode(errors="surrogateescape"))
    except OSError as error:
        log.warning("%s: cannot record the code (%s)", path, error)
