"""Help with schedulers: remedies for their refusals, values handed to jobs, a plain path of the interpreter.

Slurm reports what it refuses and not which setting asked for it. After a workflow failed, its log is searched
for the refusals that a wrong site value brings, and the setting to change is named. The files that were made
before stay; the same command goes on from them.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import shlex
import subprocess
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from spider.files import digest, hidden

log = logging.getLogger(__name__)

_SITE = "at the top of profiles/slurm/config.yaml"
_PARTITIONS = "in profiles/slurm/partitions.yaml"
_RUN = "under `resources:` of the run in the configuration"

_REMEDIES = {
    r"invalid partition specified: (?P<name>[^\s']+)": (
        "this cluster has no partition {name}: name those of your site "
        f"{_PARTITIONS}; `sinfo -s` lists what there is"
    ),
    r"Invalid account|account \S+ appears to be invalid": (
        f"Slurm does not take this account on this partition: set account {_SITE}; "
        "`sacctmgr show assoc user=$USER format=account,partition` lists yours"
    ),
    r"Invalid generic resource|Invalid Trackable RESource": (
        f"the partition has no such GPUs: set max_gpu of the partitions {_PARTITIONS}, or gpus {_RUN}; "
        "`sinfo -o '%P %G'` lists what each has"
    ),
    r"Requested time limit is invalid|time limit exceeds|TIME limit": (
        f"the partition allows jobs less time: set longest {_SITE}; `sinfo -o '%P %l'` lists the limits"
    ),
    r"Requested node configuration is not available|Memory specification can not be satisfied"
    r"|More processors requested|Node count specification invalid": (
        f"no node of the partition is so large: set threads, mem_mb, gpus and nodes {_RUN}; "
        "`sinfo -o '%P %D %c %m %G'` lists the nodes"
    ),
    r"sbatch: (?:command )?not found|No such file or directory: 's(?:batch|acct)'": (
        "Slurm's commands are not on this machine: start Snakemake on a login node of the cluster"
    ),
    r"Unable to contact slurm controller|Could not establish a configuration source": (
        "Slurm does not answer: give the same command again once `sinfo` does"
    ),
}


def remedies(logs: Iterable[str]) -> list[str]:
    """Return what to change: a line for each kind of refusal in Snakemake's logs of a failed workflow."""
    text = "".join(Path(log).read_text(encoding="utf-8", errors="replace") for log in logs)
    refusals = ((re.search(pattern, text), advice) for pattern, advice in _REMEDIES.items())
    return [advice.format(**match.groupdict()) for match, advice in refusals if match]


def packed(value: Any) -> str:
    """Return a JSON value as letters, digits, - and _, which any shell and scheduler passes on unchanged."""
    return base64.urlsafe_b64encode(zlib.compress(json.dumps(value).encode())).decode().rstrip("=")


def unpacked(text: str) -> Any:
    """Return the value that `packed` was given."""
    padded = text + "=" * (-len(text) % 4)
    return json.loads(zlib.decompress(base64.urlsafe_b64decode(padded)))


def lacking_gpus(gpus: int) -> str | None:
    """Return why jobs on this machine cannot have so many GPUs, or None where they can.

    Another process looks: torch takes seconds to import, and holds GPU memory once it has looked.
    """
    command = [sys.executable, "-m", "spider.processes.device", str(gpus)]
    looked = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if looked.returncode == 0 else looked.stderr.strip().splitlines()[-1]


def one_word(python: str) -> str:
    """Return a path of this interpreter without a space or another character that a shell takes apart.

    The script that Snakemake sends to a scheduler names the interpreter unquoted. Where its folder has a
    space, the environment gets a link in the user's cache folder, which a cluster shares as it shares homes.

    Raises:
        ValueError: that folder has a space as well, or cannot be written.
    """
    if shlex.quote(python) == python:
        return python
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    link = cache / "spider" / "environments" / digest(sys.prefix)
    plain = str(link / Path(python).relative_to(sys.prefix))
    if shlex.quote(plain) != plain:
        raise ValueError(
            f"{python}: a scheduler's job scripts cannot name an interpreter in a folder with a space, and "
            f"{cache} is no better for a link; move the project, or name another folder in XDG_CACHE_HOME"
        )
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        if not (link.is_symlink() and os.readlink(link) == sys.prefix):
            beside = hidden(link, "tmp")
            beside.symlink_to(sys.prefix)
            beside.replace(link)
    except OSError as error:
        raise ValueError(
            f"{link}: cannot link the environment there for a scheduler's job scripts ({error.strerror}); "
            "name another folder in XDG_CACHE_HOME, or move the project to a folder without a space"
        ) from None
    log.warning("jobs call this environment by %s: their scripts cannot name a folder with a space", link)
    return plain
