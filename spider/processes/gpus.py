"""Hand out the GPUs of this machine: a command that computes takes its own, and its process sees no others.

Each GPU has a file in a folder that all users of the machine share. It belongs to the processes that hold a
kernel lock on the file, and the kernel releases the lock when they end in any way. A command that waits has a
file, too. It takes GPUs, each as it becomes free, once no older command waits for one of the same. So small
commands never keep a large one waiting. This costs milliseconds, and one look at the queue every `POLL`
seconds of waiting.

Where a scheduler gives each job its own GPUs, a command finds them free. The folder is ``/tmp/spider-gpus``.
SPIDER_GPU_LOCKS names another one, for containers that share GPUs and not ``/tmp``.

`bounds` counts the GPUs and the memory that this machine can give to all jobs at once. Snakemake bounds a
resource only where somebody sets a bound: without one it starts every job for which a core is free.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from spider.common.errors import TrainingError

log = logging.getLogger(__name__)

#: Seconds between two looks at the queue.
POLL = 0.2
#: The variable that names the devices of CUDA for a process, and the one that numbers them.
VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
#: The UUIDs of a command's GPUs, for the processes that it starts.
CLAIMED = "SPIDER_GPUS"


def visible() -> dict[str, str]:
    """Return the UUID of each GPU that this process may use, by its name in CUDA_VISIBLE_DEVICES.

    A name is a number, or a UUID where the user's variable has UUIDs or a GPU is divided (MIG). The result is
    empty without NVIDIA's driver.
    """
    gpus = _uuids()
    chosen = os.environ.get(VISIBLE)
    if chosen is None:
        named = [(str(number), uuid) for number, uuids in enumerate(gpus) for uuid in uuids]
        return {uuid if uuid.startswith("MIG") else number: uuid for number, uuid in named}
    found: dict[str, str] = {}
    for name in map(str.strip, chosen.split(",")):
        # CUDA also takes the beginning of a UUID, and ignores the names after one that it does not know.
        if name.isdigit():
            matching = gpus[int(name)][:1] if int(name) < len(gpus) else []
        else:
            matching = [uuid for uuids in gpus for uuid in uuids if name and uuid.startswith(name)]
        if len(matching) != 1 or matching[0] in found.values():
            break
        found[name] = matching[0]
    return found


def _uuids() -> list[list[str]]:
    """Return for each GPU of this machine its UUID, or those of its instances if it is divided."""
    import pynvml

    gpus: list[list[str]] = []
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        for number in range(pynvml.nvmlDeviceGetCount()):
            gpu = pynvml.nvmlDeviceGetHandleByIndex(number)
            instances = []
            with contextlib.suppress(pynvml.NVMLError):  # most GPUs cannot be divided
                divided = pynvml.nvmlDeviceGetMigMode(gpu)[0]
                for place in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu) if divided else 0):
                    instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, place)
                    instances.append(pynvml.nvmlDeviceGetUUID(instance))
            gpus.append(instances or [pynvml.nvmlDeviceGetUUID(gpu)])
    return gpus


@contextlib.contextmanager
def claimed(count: int, local_rank: int | None = None) -> Iterator[None]:
    """Take this many GPUs for the process inside, and for those that it starts; wait until they are free.

    CUDA sees no others inside, and none at all if the number is 0, so torch computes on the CPU. Enter it
    before torch uses CUDA. Nothing is taken on a machine with fewer GPUs, so that torch says what is missing.

    Args:
        local_rank: number of this process if ``torchrun`` has started several. It takes the GPU of this
            number and hides none, and does not wait: such processes could wait for each other for ever.

    Raises:
        TrainingError: the GPU of ``local_rank`` is taken.
    """
    with contextlib.ExitStack() as held:
        names, uuids = None, [uuid for uuid in os.environ.get(CLAIMED, "").split(",") if uuid]
        if count == 0:
            names, uuids = [], []
        elif uuids:  # inherited
            for uuid in uuids:
                fcntl.flock(_opened(_folder() / uuid, held), fcntl.LOCK_SH | fcntl.LOCK_NB)
        elif len(found := visible()) >= count:
            if local_rank is not None:
                _take_number(found, local_rank, held)
            else:
                names = _wait_for(found, count, held)
                uuids = [found[name] for name in names]
                log.info("GPUs: %s of the visible %s", ", ".join(names), ", ".join(found))
        if names is not None:
            values = {VISIBLE: ",".join(names), CLAIMED: ",".join(uuids)}
            if VISIBLE not in os.environ and ORDER not in os.environ:
                values[ORDER] = "PCI_BUS_ID"  # the order of the driver, whose numbers the names are
            for name, value in values.items():
                if name in os.environ:
                    held.callback(os.environ.__setitem__, name, os.environ[name])
                else:
                    held.callback(os.environ.pop, name, None)
                os.environ[name] = value
        yield


def _wait_for(found: dict[str, str], count: int, held: contextlib.ExitStack) -> list[str]:
    """Return the names of this many of the GPUs, after waiting for them; ``held`` keeps their locks."""
    folder = _folder()
    ticket = folder / f"waiting-{time.time_ns():020d}-{os.getpid()}"
    taken: list[str] = []
    said = False
    with contextlib.ExitStack() as waiting:
        with _alone(folder):
            waits = _opened(ticket, waiting)
            waiting.callback(ticket.unlink, missing_ok=True)
            fcntl.flock(waits, fcntl.LOCK_EX)
            os.write(waits, json.dumps([*found.values()]).encode())
        while True:
            holders = []
            with _alone(folder):
                wanted = (
                    [] if _older(ticket, {*found.values()}) else [name for name in found if name not in taken]
                )
                for name in wanted:
                    if holder := _take(folder / found[name], held):
                        holders.append(f"GPU {name} is held by {holder}")
                    else:
                        taken.append(name)
                        if len(taken) == count:
                            return taken
            if not said:
                said = True
                log.info(
                    "waiting for %d GPUs: %s", count, "; ".join(holders) or "an older command waits, too"
                )
            time.sleep(POLL)


def _take_number(found: dict[str, str], number: int, held: contextlib.ExitStack) -> None:
    """Take the GPU of this number, if there are so many."""
    folder = _folder()
    for name in [*found][number : number + 1]:
        with _alone(folder):
            holder = _take(folder / found[name], held)
        if holder:
            raise TrainingError(
                f"GPU {name} is held by {holder}; wait for it to end, or name other GPUs in {VISIBLE}"
            )


def _take(path: Path, held: contextlib.ExitStack) -> str | None:
    """Take a GPU if it is free, else return who holds it.

    Its lock becomes a shared one, which the processes that this one starts hold, too.
    """
    with contextlib.ExitStack() as attempt:
        file = _opened(path, attempt)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return path.read_text(errors="replace")
        holder = f"process {os.getpid()} ({shlex.join(['spider', *sys.argv[1:]])}), since "
        os.ftruncate(file, 0)
        os.pwrite(file, (holder + time.strftime("%Y-%m-%d %H:%M:%S")).encode(), 0)
        fcntl.flock(file, fcntl.LOCK_SH)
        held.push(attempt.pop_all())
    return None


def _older(ticket: Path, wanted: set[str]) -> bool:
    """Return whether an older command waits for one of the same GPUs. Remove what killed ones have left."""
    for path in sorted(ticket.parent.glob("waiting-*")):
        if path.name >= ticket.name:
            break
        with contextlib.ExitStack() as attempt, contextlib.suppress(FileNotFoundError):
            file = _opened(path, attempt, os.O_RDWR)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            except BlockingIOError:
                if wanted & {*json.loads(path.read_bytes())}:
                    return True
    return False


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the lock that all changes of the queue need."""
    with contextlib.ExitStack() as stack:
        fcntl.flock(_opened(folder / "queue", stack), fcntl.LOCK_EX)
        yield


def _folder() -> Path:
    """Return the folder of the locks, and make it for all users of this machine."""
    folder = Path(os.environ.get("SPIDER_GPU_LOCKS") or "/tmp/spider-gpus")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(parents=True)
        folder.chmod(0o777)
    return folder


def _opened(path: Path, stack: contextlib.ExitStack, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """Open a file that every user may lock, until the end of ``stack``."""
    file = os.open(path, flags | os.O_NOFOLLOW, 0o666)
    stack.callback(os.close, file)
    with contextlib.suppress(PermissionError):  # another user's, who has set it
        os.fchmod(file, 0o666)
    return file


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
