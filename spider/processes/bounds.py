"""Count the GPUs and the memory that this machine can give to all jobs at once.

Snakemake bounds a resource only where somebody sets a bound. Without one it starts every job for which a core
is free, and does not compare the GPUs and the memory that they request with those of the machine.
"""

from __future__ import annotations

from pathlib import Path

import psutil

from spider.processes.gpus import visible

#: Where Linux limits the memory of a container or of a scheduler's job: control groups of version 2 and 1.
_GROUPS = {"": ("/sys/fs/cgroup", "memory.max"), "memory": ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")}


def memory_bytes() -> int:
    """Return the bytes of memory of this machine, or of the container or the scheduler's job around us."""
    limits = [psutil.virtual_memory().total]
    groups = Path("/proc/self/cgroup")
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, group = line.split(":", 2)
        root, name = _GROUPS.get(controllers, ("", ""))
        inside = Path(root + group) if root else None
        for folder in (inside, *inside.parents) if inside else ():
            limit = folder / name
            if limit.is_file() and (text := limit.read_text().strip()).isdigit():
                limits.append(int(text))
    return min(limits)


def bounds() -> dict[str, int]:
    """Return the most that jobs may use at once, by the names of Snakemake's resources."""
    return {"gpu": len(visible()), "mem_mb": memory_bytes() // 1_000_000}
