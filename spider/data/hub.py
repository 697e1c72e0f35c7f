"""Files of a Hugging Face dataset repository, whole and checked, however often the way there breaks.

The library retries a request but not a download: a new process starts from zero, bytes corrupted at equal
length are accepted, and some calls give up on the first 503. So a file is read in ranges through
`HfFileSystem` into a partial file beside its final name, with a small JSON that says whose content it is. A
killed process is continued where it stopped; content of another hash is discarded. The finished file is
checked against the hash the hub itself states (SHA-256 for large files, the git blob id for small ones),
flushed and renamed.

Every failure is a `DownloadError` of one line that names the file, ``repo@revision`` and the remedy. The
library's own settings count: ``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HUB_OFFLINE`` (then a file in its cache is
used).
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import hashlib
import logging
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout
from huggingface_hub import HfApi, HfFileSystem, constants, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFolder
from tqdm import tqdm

from spider.files import fsync_dir, read_json, replacing, sha256, write_json

log = logging.getLogger(__name__)

T = TypeVar("T")
CHUNK_BYTES = 16 << 20
"""Bytes a request; what a killed process loses at most."""
RETRIED_STATUS = (408, 429, 500, 502, 503, 504)
MAX_WAIT = 60.0


class DownloadError(ValueError):
    """A file could not be had; the message names it, the repository and the remedy."""


@dataclass(frozen=True)
class Remote:
    """What the hub says about one file."""

    repo: str
    revision: str
    file: str
    size: int
    hash: str
    """``sha256:...`` for a file in large-file storage, ``git:...`` (SHA-1 of the blob) for any other."""

    def __str__(self) -> str:
        return f"{self.file} of {self.repo}@{self.revision}"


@dataclass
class Patience:
    """How often to try again without progress, and the first wait in seconds (doubled, jittered, capped)."""

    attempts: int
    backoff: float

    def call(self, what: str, attempt: Callable[[], T], progressed: Callable[[], bool] = lambda: False) -> T:
        """Run ``attempt`` until it succeeds; an error of the network or the server is retried."""
        failures = 0
        while True:
            try:
                return attempt()
            except (HTTPError, FileNotFoundError, ConnectionError, TimeoutError) as error:
                cause = _cause(error)
                if not _is_transient(cause):
                    raise cause from None
                failures = 1 if progressed() else failures + 1
                if failures >= self.attempts:
                    raise cause from None
                wait = min(MAX_WAIT, self.backoff * 2 ** (failures - 1)) * random.uniform(0.5, 1.0)
                log.warning("%s: %s; trying again in %.1f s", what, _brief(cause), wait)
                time.sleep(wait)


def download_file(
    repo: str,
    revision: str,
    file: str,
    output: Path,
    *,
    attempts: int = 6,
    backoff: float = 1.0,
    chunk_bytes: int = CHUNK_BYTES,
) -> dict[str, Any]:
    """Bring one file of a dataset repository to ``output``; nothing is transferred where it is already whole.

    A terminal shows a bar, a log a line every ten seconds.

    Args:
        repo, revision, file: ``owner/name``, commit (or branch or tag), path inside the repository.
        attempts: tries in a row without a byte of progress before giving up.
        backoff: seconds before the second try.
        chunk_bytes: bytes a request.

    Returns:
        ``name`` (path inside the repository), ``bytes`` and ``sha256``.

    Raises:
        DownloadError: missing file, revision or repository; no access; no network; server down; wrong hash
            twice; no space or no right to write.
    """
    what = f"{file} of {repo}@{revision}"
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with _alone(output, what):
            if constants.HF_HUB_OFFLINE:
                _from_cache(repo, revision, file, output)
            else:
                _from_hub(repo, revision, file, output, Patience(attempts, backoff), chunk_bytes)
            return {"name": file, "bytes": output.stat().st_size, "sha256": sha256(output)}
    except (HTTPError, HFValidationError, EntryNotFoundError, ConnectionError, TimeoutError) as error:
        raise DownloadError(explain(error, repo, revision, file)) from None
    except OSError as error:
        raise DownloadError(_explain_disk(error, what, output)) from None


@contextlib.contextmanager
def _alone(output: Path, what: str) -> Iterator[None]:
    """Hold the lock of one output; a second process waits, then finds the file whole."""
    lock = FileLock(output.with_name(f".{output.name}.lock"))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        log.info("%s: another process is downloading it; waiting", what)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _from_hub(
    repo: str, revision: str, file: str, output: Path, patience: Patience, chunk_bytes: int
) -> None:
    remote = look_up(repo, revision, file, patience)
    if output.exists():
        if _hash_of(output, remote) == remote.hash:
            log.info("%s: already here, whole", remote)
            return
        log.warning("%s: %s has another content; it will be replaced", remote, output)
    partial = output.with_name(f".{output.name}.partial")
    state = output.with_name(f".{output.name}.partial.json")
    for corrupt_before in (False, True):
        _transfer(remote, partial, state, patience, chunk_bytes)
        got = _hash_of(partial, remote)
        if got == remote.hash:
            break
        partial.unlink()
        state.unlink(missing_ok=True)
        if corrupt_before:
            raise DownloadError(
                f"{remote}: corrupt twice, expected {remote.hash} but got {got}; nothing was kept, "
                "check the proxy or mirror (HF_ENDPOINT) and run again"
            )
        log.warning("%s: corrupt, expected %s but got %s; fetching it once more", remote, remote.hash, got)
    os.replace(partial, output)
    fsync_dir(output.parent)
    state.unlink(missing_ok=True)


def look_up(repo: str, revision: str, file: str, patience: Patience) -> Remote:
    """Size and hash of one file in the hub's own words; raises `DownloadError` or an error for `explain`."""
    api = HfApi()
    what = f"{file} of {repo}@{revision}"
    infos = patience.call(
        what, lambda: api.get_paths_info(repo, [file], repo_type="dataset", revision=revision)
    )
    if not infos:
        raise DownloadError(f"{what}: no such file in the repository{_similar(api, repo, revision, file)}")
    info = infos[0]
    if isinstance(info, RepoFolder):
        raise DownloadError(f"{what}: is a folder; name the files in it")
    digest = f"sha256:{info.lfs.sha256}" if info.lfs else f"git:{info.blob_id}"
    return Remote(repo, revision, file, info.size, digest)


def _similar(api: HfApi, repo: str, revision: str, file: str) -> str:
    try:
        names = api.list_repo_files(repo, repo_type="dataset", revision=revision)
    except (HTTPError, OSError):
        return "; look at its file list"
    close = difflib.get_close_matches(file, names, n=3)
    same_name = [name for name in names if Path(name).name == Path(file).name and name not in close]
    hint = ", ".join((close + same_name)[:3])
    return f"; did you mean {hint}?" if hint else f" (it holds {len(names)} others)"


def _transfer(remote: Remote, partial: Path, state: Path, patience: Patience, chunk_bytes: int) -> None:
    """Append to the partial file until it has the size of the remote one, then flush it to disk."""
    if partial.exists():
        known = _known(state)
        same = (known.get("size"), known.get("hash")) == (remote.size, remote.hash)
        if not same or partial.stat().st_size > remote.size:
            log.warning("%s: discarding a partial download of other content", remote)
            partial.unlink()
    write_json(state, asdict(remote))
    done = partial.stat().st_size if partial.exists() else 0
    free = shutil.disk_usage(partial.parent).free
    if remote.size - done > free:
        raise OSError(errno.ENOSPC, f"{remote.size - done:,} bytes are needed, {free:,} are free")
    if done:
        log.info("%s: resuming at %s of %s bytes", remote, f"{done:,}", f"{remote.size:,}")
    filesystem = HfFileSystem()
    path = f"datasets/{remote.repo}/{remote.file}"
    options = {"revision": remote.revision, "size": remote.size, "cache_type": "none"}
    bar = tqdm(
        total=remote.size, initial=done, unit="B", unit_scale=True, desc=remote.file, disable=None
    )  # shown on a terminal only
    began = spoke = time.monotonic()
    at_last_failure = at_start = done
    with bar, open(partial, "ab") as out:

        def progressed() -> bool:
            nonlocal at_last_failure
            before, at_last_failure = at_last_failure, done
            return done > before

        def read() -> bytes:
            with filesystem.open(path, "rb", **options) as source:
                source.seek(done)
                data: bytes = source.read(min(chunk_bytes, remote.size - done))
            if len(data) != min(chunk_bytes, remote.size - done):
                raise ConnectionError(f"asked for a range of the file, got {len(data)} bytes")
            return data

        while done < remote.size:
            data = patience.call(str(remote), read, progressed)
            out.write(data)
            out.flush()
            done += len(data)
            bar.update(len(data))
            if bar.disable and time.monotonic() - spoke >= 10:
                spoke = time.monotonic()
                rate = (done - at_start) / (spoke - began) / 1e6
                log.info("%s: %.0f of %.0f MB, %.1f MB/s", remote, done / 1e6, remote.size / 1e6, rate)
        os.fsync(out.fileno())


def _known(state: Path) -> dict[str, Any]:
    try:
        known = read_json(state)
    except ValueError:
        return {}
    return known if isinstance(known, dict) else {}


def _from_cache(repo: str, revision: str, file: str, output: Path) -> None:
    if output.exists():
        return
    try:
        cached = Path(
            hf_hub_download(repo, file, repo_type="dataset", revision=revision, local_files_only=True)
        )
    except (EntryNotFoundError, OSError):
        raise DownloadError(
            f"{file} of {repo}@{revision}: HF_HUB_OFFLINE is set and the file is not in the cache "
            f"{constants.HF_HUB_CACHE}; unset it, or fill that cache where there is a network"
        ) from None
    blob = cached.resolve()  # its name is the hash of its content
    with replacing(output) as beside:
        shutil.copyfile(blob, beside)
        expected = f"{'sha256' if len(blob.name) == 64 else 'git'}:{blob.name}"
        got = _hash_of(beside, Remote(repo, revision, file, blob.stat().st_size, expected))
        if len(blob.name) in (40, 64) and got != expected:
            raise DownloadError(
                f"{file} of {repo}@{revision}: the cached copy {blob} is corrupt, expected {expected} "
                f"but got {got}; delete it and fetch it again with a network"
            )


def _hash_of(path: Path, remote: Remote) -> str:
    if remote.hash.startswith("sha256:"):
        return f"sha256:{sha256(path)}"
    begun = hashlib.sha1(f"blob {path.stat().st_size}\0".encode())
    with open(path, "rb") as f:
        return f"git:{hashlib.file_digest(f, lambda: begun).hexdigest()}"


# ------------------------------------------------------------------------------------------------ errors


def _cause(error: Exception) -> Exception:
    """The hub's answer behind the FileNotFoundError that `HfFileSystem` makes of it."""
    inner = error.__cause__
    return inner if isinstance(error, FileNotFoundError) and isinstance(inner, HTTPError) else error


def _is_transient(error: Exception) -> bool:
    if isinstance(error, HfHubHTTPError):
        return _status(error) in RETRIED_STATUS
    return isinstance(error, (HTTPError, ConnectionError, TimeoutError))


def _status(error: Exception) -> int:
    return getattr(getattr(error, "response", None), "status_code", 0)


def _brief(error: Exception) -> str:
    if _status(error):
        return f"the hub answers {_status(error)}"
    first = (str(error).strip() or "no details").splitlines()[0]
    return f"{type(error).__name__}: {first}"


def explain(error: Exception, repo: str, revision: str, file: str) -> str:
    """One line on an error of the library: the file, what is wrong, the remedy."""
    what, page = f"{file} of {repo}@{revision}", f"{constants.ENDPOINT}/datasets/{repo}"
    status = _status(error)
    if isinstance(error, GatedRepoError) or status == 403:
        return (
            f"{what}: access is gated ({status}); accept the terms at {page} and set HF_TOKEN to your token"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{what}: no such dataset repository, or a private one ({status}); check the name at {page}, "
            "and set HF_TOKEN if it is private"
        )
    if status == 401:
        return f"{what}: the hub refuses the token (401); check HF_TOKEN"
    if isinstance(error, RevisionNotFoundError):
        return f"{what}: no such revision; take a commit from {page}/commits/main"
    if isinstance(error, EntryNotFoundError):
        return f"{what}: no such file in the repository; look at {page}/tree/{revision}"
    if isinstance(error, HFValidationError):
        return f"{what}: not a repository name (owner/name): {str(error).splitlines()[0]}"
    if status:
        return f"{what}: the hub still answers {status}; run again later, what is here so far is kept"
    return (
        f"{what}: cannot reach {constants.ENDPOINT} ({_brief(error)}); check the network, the proxy and "
        "HF_ENDPOINT, then run again: what is here so far is kept"
    )


def _explain_disk(error: OSError, what: str, output: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"{what}: no space left in {output.parent} ({error.strerror}); free some and run again to resume"
        )
    return f"{what}: cannot write {output} ({error.strerror or error}); check the folder and its permissions"
