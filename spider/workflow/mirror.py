"""Copy what a workflow has made to an address of fsspec, and restore it on an empty machine.

    index/00000003-9f2c41aa/00000017.json    each file of the results folder: size, time, hash, and its object
    objects/00000003-9f2c41aa/SHA256         a large file, or many small ones one after another
    lease/                                   the machine that writes now (`spider.workflow.lease`)

Indexes and objects never change. An index is written after its objects, so a kill at any moment leaves the
index before it. What no index needs is removed after the next index is written.

A process beside the workflow looks for what is new, so no job waits. It copies a state that the folder once
had: two walks that agree, with links to the new files made in between. A link keeps a checkpoint that is
deleted during a slow upload. Files that grow line by line are copied whenever another file is new.

Left out are outputs of jobs that have not finished, hidden files, and the local MLflow store, which is made
again. The records of the jobs are in the results folder (`spider.provenance.recorder`).
With them and the times of the files, a restored folder runs no finished job again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import filelock
import psutil
from pydantic import Field

from spider.common import files
from spider.common.formatting import quantity
from spider.common.record import Record
from spider.common.results import MARK
from spider.provenance.made import TIMESTAMP, Made, Stat, edited, read_all, stat_of, stats
from spider.tracking.target import ARTIFACTS
from spider.workflow.lease import Lease, LeaseLost, Remote

log = logging.getLogger(__name__)

#: Least seconds between two looks at the folder, and the share of a core that looks take if nothing is new.
LOOK, SHARE = 1.0, 0.002
#: Seconds until the next attempt after an error.
RETRY = 30.0
#: Bytes from which on a file has an object of its own.
SMALL = 1 << 20
#: Bytes of small files that are not needed any more, from which on the others are copied again.
WASTE = 16 << 20
#: Attempts to copy the rest after the end of the workflow.
ATTEMPTS = 3
#: Files that grow line by line. All others are replaced as a whole.
GROWING = (".jsonl", ".log", ".tsv")
_TOKENS, _LOCK, _STAGING = ".mirror.json", ".mirror.lock", ".mirror"

#: Size and time of each file by its path.
Tree = dict[str, tuple[int | str, int]]


class Entry(NamedTuple):
    """A file, and the object that has its bytes from ``start`` on."""

    size: int
    time: int
    sha256: str
    object: str
    start: int


class Index(Record):
    """All files of a results folder at one moment."""

    WHAT = "the index of a mirror"
    REMEDY = "use the version of Spider that wrote it, or name another address"

    format: int = 1
    runs: list[str]
    host: str = ""
    written: float = 0.0
    files: dict[str, Entry] = Field(default_factory=dict)
    links: dict[str, str] = Field(default_factory=dict)
    packs: dict[str, int] = Field(default_factory=dict)
    """Sizes of the objects with many small files."""


class Mirror:
    """The mirror of a results folder.

    Args:
        runs: Names of the runs of the configuration.
    """

    def __init__(self, url: str, root: Path, runs: list[str]) -> None:
        self.remote, self.root, self.runs = Remote(url), root, runs
        self.lease = Lease(self.remote)
        self.index = Index(runs=runs)
        self._seen: Tree = {}
        self._objects: set[str] = set()
        self._written = 0
        self._lock = filelock.FileLock(root / _LOCK)

    def __str__(self) -> str:
        return f"mirror: {self.remote.url}"

    def newest(self) -> tuple[str, Index] | None:
        """Return the newest whole index, and the token of its machine."""
        for name in reversed(self.remote.names("index")):
            if plain := self.remote.json(name):
                return name.split("/")[1], Index.parse(plain, Path(name))
        return None

    # ------------------------------------------------------------------------------------------ begin and end

    def acquire(self, *, pull: bool = False) -> bool:
        """Take the lease for this folder, and restore an empty folder, or with ``pull`` any folder.

        Returns:
            False if another process mirrors this folder.

        Raises:
            ValueError: another machine has the lease, or the address has what this folder lacks.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except filelock.Timeout:
            return False
        try:
            with self.remote.explained():
                # A copy of this folder on another machine has the same tokens.
                self.lease.acquire(self._tokens(host=socket.gethostname()))
                before = self._before()
                if before and (pull or not (self.root / MARK).exists()):
                    log.warning("%s: %d files restored in %s", self, self.pull(), self.root)
                elif before not in (None, *self._tokens()):
                    raise ValueError(
                        f"{self}: {self.index.host} wrote it last, and {self.root} lacks what "
                        "it wrote; move this folder away and run again, which restores it, or name another "
                        "address for this folder"
                    )
                noted = {"url": self.remote.url, "host": socket.gethostname()}
                files.write_json(self.root / _TOKENS, {**noted, "tokens": [before, self.lease.token]})
                self._objects = {*self.remote.names("objects")}
        except BaseException:
            self.release()
            raise
        return True

    def _before(self) -> str | None:
        """Read the newest index, and return its token; raise `ValueError` for files of others."""
        found = self.newest()
        if found is None:
            foreign = [name for name in self.remote.names() if name.split("/")[0] not in ("lease", "objects")]
            if foreign:
                raise ValueError(f"{self}: has files of others, such as {foreign[0]}; name an empty folder")
            return None
        token, self.index = found
        if token not in self._tokens() and not {*self.runs} & {*self.index.runs}:
            theirs, ours = (", ".join(runs) or "none" for runs in (self.index.runs, self.runs))
            raise ValueError(
                f"{self}: has the runs {theirs}, and this configuration has {ours}; name another folder"
            )
        return token

    def _tokens(self, **same: str) -> list[str]:
        """Return the tokens that an index of this folder may have here, if these notes are the same."""
        with suppress(ValueError, KeyError, TypeError):
            noted = files.read_json(self.root / _TOKENS)
            if all(noted[name] == value for name, value in {"url": self.remote.url, **same}.items()):
                return list(noted["tokens"])
        return []

    def adopt(self) -> None:
        """Continue with the lease of a process of this machine that has released the kernel lock."""
        self._lock.acquire(timeout=60)
        self.lease.token = self._tokens()[-1]
        with self.remote.explained():
            if found := self.newest():
                _, self.index = found
            self._objects = {*self.remote.names("objects")}

    def release(self, *, lease: bool = True) -> None:
        """Release the kernel lock, and the lease unless a process follows that calls `adopt`."""
        if lease:
            self.lease.release()
        self._lock.release()

    # -------------------------------------------------------------------------------------------------- push

    def push(self, *, last: bool = False) -> bool:
        """Copy what is new; return whether there was anything.

        Args:
            last: Whether a file that has only grown is new too.

        Raises:
            LeaseLost: another machine has the lease. Nothing that it reads was changed.
            ValueError: the address does not take it. The next call goes on.
        """
        staging = self.root / _STAGING
        try:
            for _ in range(20):
                shutil.rmtree(staging, ignore_errors=True)
                with suppress(FileNotFoundError):  # A checkpoint was deleted meanwhile.
                    tree = self._walk()
                    if tree == self._seen or (not last and _whole(tree) == _whole(self._seen)):
                        return False
                    new = self._stage(tree, staging)
                    if _whole(self._walk()) == _whole(tree):
                        break
            else:
                return False
            with self.remote.explained():
                self._upload(tree, new)
            self._seen = tree
            return True
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _walk(self) -> Tree:
        """Return size and time of each file to mirror, and the target of each link in place of its size."""
        tree: Tree = {}
        for folder, folders, names in os.walk(self.root):
            folders[:] = filter(_mirrored, folders)
            for path in (Path(folder, name) for name in [*folders, *filter(_mirrored, names)]):
                if path.is_symlink():
                    tree[path.relative_to(self.root).as_posix()] = os.readlink(path), 0
                elif not path.is_dir():
                    stat = path.stat()
                    tree[path.relative_to(self.root).as_posix()] = stat.st_size, stat.st_mtime_ns
        for record in [path for path in tree if path.startswith("made/")]:
            for output in _unfinished(self.root / record, tree[record]):
                for one in [one for one in tree if f"{one}/".startswith(f"{output}/")]:
                    del tree[one]
        return tree

    def _stage(self, tree: Tree, staging: Path) -> dict[str, Path]:
        """Link the files that the index lacks into a hidden folder; copy those that grow."""
        small = sum(one.size for one in self.index.files.values() if one.object in self.index.packs)
        wasted = sum(self.index.packs.values()) - small > max(WASTE, small)
        staging.mkdir()
        new = {}
        for number, (path, stat) in enumerate(tree.items()):
            known = self.index.files.get(path)
            if isinstance(stat[0], str):
                continue
            if known is None or known[:2] != stat or (wasted and stat[0] < SMALL):
                new[path] = staging / str(number)
                try:
                    (shutil.copyfile if path.endswith(GROWING) else os.link)(self.root / path, new[path])
                except OSError:  # The disk has no hard links, or the file is gone.
                    shutil.copyfile(self.root / path, new[path])
        return new

    def _upload(self, tree: Tree, new: dict[str, Path]) -> None:
        """Write objects and then an index of a tree, and remove what no index needs any more."""
        self.lease.check()
        made = {path: one for path, one in self.index.files.items() if path in tree and path not in new}
        packs, pack = dict(self.index.packs), bytearray()
        own = f"objects/{self.lease.token}"
        for path, file in new.items():
            entry = Entry(file.stat().st_size, int(tree[path][1]), files.sha256(file), "", len(pack))
            if entry.size < SMALL:
                pack += file.read_bytes()
            else:
                entry = entry._replace(object=f"{own}/{entry.sha256}", start=0)
                if entry.object not in self._objects:
                    self.remote.upload(file, entry.object)
                    self._objects.add(entry.object)
            made[path] = entry
        if pack:
            name = f"{own}/{hashlib.sha256(pack).hexdigest()}"
            self.remote.write(name, bytes(pack))
            packs[name] = len(pack)
            made = {path: one if one.object else one._replace(object=name) for path, one in made.items()}
        used = {one.object for one in made.values()}
        self._objects |= used
        self.index = Index(
            runs=sorted({*self.runs, *self.index.runs}),
            host=socket.gethostname(),
            written=time.time(),
            files=made,
            links={path: str(one[0]) for path, one in tree.items() if isinstance(one[0], str)},
            packs={name: size for name, size in packs.items() if name in used},
        )
        self.lease.check()
        self._written += 1
        name = f"index/{self.lease.token}/{self._written:08d}.json"
        self.remote.write(name, self.index.model_dump_json().encode())
        # A machine that takes the lease from here on reads this index.
        if self.lease.check():
            self.remote.remove([one for one in self.remote.names("index") if one != name])
            self.remote.remove(sorted(self._objects - used))
            self._objects = used

    def describe(self) -> Iterator[str]:
        """Yield lines about the lease, and about what is mirrored."""
        with self.remote.explained():
            yield from (f"lease: {self.lease.who(name)}" for name in self.remote.names("lease"))
            if found := self.newest():
                _, self.index = found
        known = self.index.files
        size = quantity(sum(one.size for one in known.values()), "B")
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.index.written))
        yield f"mirrored: {len(known)} files, {size}" + f", by {self.index.host} at {at}" * bool(known)
        here = {path: stat for path, stat in _whole(self._walk()).items() if isinstance(stat[0], int)}
        lacking = [path for path, stat in here.items() if path not in known or known[path][:2] != stat]
        yield f"not mirrored: {len(lacking)} files of {self.root}"

    # -------------------------------------------------------------------------------------------------- pull

    def pull(self) -> int:
        """Restore what this folder lacks, and return the number of files. Another call goes on after a kill.

        A file that is damaged in the mirror is left out, so that its job runs again.

        Raises:
            ValueError: a file of another content is here. Nothing was changed.
        """
        wanted = {}
        for path, one in self.index.files.items():
            assert not Path(path).is_absolute() and ".." not in Path(path).parts, path
            file = self.root / path
            if (found := stat_of(file)) == one[:2]:
                continue
            if found and (found[0] != one.size or files.sha256(file) != one.sha256):
                raise ValueError(f"{self}: has another {path} than {self.root}; move this folder away")
            wanted[path] = one
        # The file that marks a results folder comes last.
        order = sorted(wanted, key=lambda path: (path == MARK, wanted[path].object, wanted[path].start))
        read = lru_cache(1)(self.remote.read)
        for path in order:
            one = wanted[path]
            try:
                with files.replacing(self.root / path) as beside:
                    if one.object in self.index.packs:
                        beside.write_bytes(read(one.object)[one.start : one.start + one.size])
                    else:
                        self.remote.download(one.object, beside)
                    if files.sha256(beside) != one.sha256:
                        raise FileNotFoundError
                    os.utime(beside, ns=(one.time, one.time))
            except FileNotFoundError:
                log.warning("%s: %s is damaged and left out, its job runs again", self, path)
        for path, target in self.index.links.items():
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                (self.root / path).symlink_to(target)
        self._restore_times()
        return len(order)

    def _restore_times(self) -> None:
        """Give the user's own files the times that the jobs saw, if their content is the same.

        Snakemake runs a job again if an input is newer than the output, as in a new clone.
        """
        for made in read_all(self.root).values():
            here = stats(made.own)
            for name in here.keys() - set(edited(made, here)):
                with suppress(OSError):  # Then its jobs run again.
                    os.utime(name, ns=(made.own[name][1], made.own[name][1]))


def _whole(tree: Tree) -> Tree:
    """Return a tree without the files that grow."""
    return {path: found for path, found in tree.items() if not path.endswith(GROWING)}


def _mirrored(name: str) -> bool:
    """Return whether a file or a folder of this name is mirrored."""
    return name == TIMESTAMP or not (name[0] == "." or name.startswith("mlflow.db") or name == ARTIFACTS)


@lru_cache(None)
def _unfinished(record: Path, stat: Stat) -> list[str]:
    """Return the outputs of a job whose newest run has not finished, by its record of this size and time."""
    jobs = Made.read(record).jobs
    return [one.path for one in jobs[-1].outputs] if jobs and jobs[-1].status != "finished" else []


# --------------------------------------------------------------------------------------- beside the workflow


def follow(mirror: Mirror) -> int:
    """Copy what is new until standard input has a byte or closes, and return the exit status.

    If another machine takes the lease, end the workflow as Ctrl-C does.
    """
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO, force=True)
    os.nice(19)
    workflow = psutil.Process().parent()
    mirror.adopt()
    closing = threading.Event()
    renewing = threading.Thread(target=mirror.lease.renew, args=[closing], daemon=True)
    renewing.start()
    pause, problem, left = 0.0, "", ATTEMPTS
    while left:
        ended = bool(select.select([sys.stdin], [], [], pause)[0])
        left -= ended
        before, problem, began, pause = problem, "", time.process_time(), LOOK
        try:
            if not mirror.push(last=ended):
                pause = max(LOOK, (time.process_time() - began) / SHARE)
        except LeaseLost as error:
            log.error("%s", error)
            if not ended and workflow is not None:
                _stop(workflow)
            return 1
        except Exception as error:  # An error of the address may not stop a workflow.
            problem, pause = str(error), RETRY
        if problem != before:
            log.warning("%s", problem or f"{mirror}: takes what is new again")
        if ended and not problem:
            break
    closing.set()
    renewing.join()
    mirror.release()
    if problem:
        log.error("%s", problem)
    return int(bool(problem))


def _stop(workflow: psutil.Process) -> None:
    """Stop the jobs of a workflow, which save first, and the workflow."""
    session = os.getsid(workflow.pid)
    for one in workflow.children(recursive=True):
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(one.pid) == session:
                one.terminate()
    workflow.send_signal(signal.SIGINT)
