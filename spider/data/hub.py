"""Files of a Hugging Face dataset repository, whole and checked, however often the way there breaks.

The library retries a request but not a download. A new process starts from zero, and corrupt bytes of the
right length are accepted. A call gives up on the first 503, or waits for as long as the server asks. So this
module reads a file in ranges, by the library's session, into a partial file beside its final name. A small
JSON beside it holds the hash of the content. A killed process continues where it stopped, and content of
another hash is discarded. After about two minutes of errors alone the download stops (`Patience`). The
finished file is checked against the hash that the hub states (SHA-256 for large files, the git blob id for
small ones), flushed and renamed.

Every failure is a `DownloadError` of one line that names the file, ``repo@revision`` and the remedy. The
library's own settings count: ``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HUB_OFFLINE`` (then a file in its cache is
used).
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import logging
import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout
from huggingface_hub import HfApi, constants, hf_hub_download, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFolder
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status
from tqdm import tqdm

from spider.files import fsync, read_json, replacing, sha256, write_json

log = logging.getLogger(__name__)

T = TypeVar("T")
#: What an error of the library, and what was asked for, come to.
Refused = Callable[[Exception, Any], ValueError]
CHUNK_BYTES = 16 << 20
"""Bytes a request; what a killed process loses at most."""
RETRIED_STATUS = (408, 429, 500, 502, 503, 504)
MAX_WAIT = 30.0


class DownloadError(ValueError):
    """A file could not be had; the message names it, the repository and the remedy."""


@dataclass(frozen=True)
class HubFile:
    """Address of a file: repository (``owner/name``), commit (or branch or tag), and path."""

    repo: str
    revision: str
    name: str

    def __str__(self) -> str:
        return f"{self.name} of {self.repo}@{self.revision}"


@dataclass(frozen=True)
class Patience:
    """How often to try without success, and the first wait in seconds (doubled, jittered, capped): with these
    about two minutes."""

    attempts: int = 9
    backoff: float = 1.0

    def call(self, what: Any, attempt: Callable[[], T], refused: Refused | None = None) -> T:
        """Run ``attempt`` until it succeeds; an error of the network or the server is retried.

        Raises `DownloadError`, or what ``refused`` makes of the error, where that did not help, or cannot.
        """
        failures = 0
        while True:
            try:
                return attempt()
            except (HTTPError, HFValidationError, FileNotFoundError, ConnectionError, TimeoutError) as error:
                cause = cause_of(error)
                hopeless = isinstance(cause, (HFValidationError, FileNotFoundError))
                if status := status_of(cause):
                    hopeless = status not in RETRIED_STATUS
                failures += 1
                if hopeless or failures >= self.attempts:
                    raise (refused or _refused)(cause, what) from None
                wait = min(MAX_WAIT, self.backoff * 2 ** (failures - 1)) * random.uniform(0.5, 1.0)
                log.warning("%s: %s; trying again in %.1f s", what, brief(cause), wait)
                time.sleep(wait)


PATIENCE = Patience()


def download_file(file: HubFile, output: Path, patience: Patience = PATIENCE) -> None:
    """Download one file of a dataset repository to ``output``. A file that is whole there is not transferred.

    A second process waits, then finds it whole. Raises `DownloadError`: missing file, revision or repository;
    no access; no network; server down; wrong hash twice; no space or no right to write.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(output.with_name(f".{output.name}.lock"))
        try:
            held = lock.acquire(blocking=False)
        except Timeout:
            log.info("%s: another process is downloading it; waiting", file)
            held = lock.acquire()
        with held:
            (_from_cache if constants.HF_HUB_OFFLINE else _from_hub)(file, output, patience)
    except OSError as error:
        wrong = f"cannot write {output} ({error.strerror or error}); check the folder and its permissions"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            wrong = f"no space left in {output.parent} ({error.strerror}); free some and run again to resume"
        raise DownloadError(f"{file}: {wrong}") from None


def _from_hub(file: HubFile, output: Path, patience: Patience) -> None:
    size, expected = look_up(file, patience)
    if output.exists():
        if _hash_like(expected, output) == expected:
            log.info("%s: already here, whole", file)
            return
        log.warning("%s: %s has another content; it will be replaced", file, output)
    partial, state = (output.with_name(f".{output.name}.partial{end}") for end in ("", ".json"))
    for corrupt_before in (False, True):
        if partial.exists() and (not state.exists() or read_json(state).get("hash") != expected):
            log.warning("%s: discarding a partial download of other content", file)
            partial.unlink()
        write_json(state, {"size": size, "hash": expected})
        _transfer(file, size, partial, patience)
        got = _hash_like(expected, partial)
        if got == expected:
            break
        partial.unlink()
        if corrupt_before:
            state.unlink()
            raise DownloadError(
                f"{file}: corrupt twice, expected {expected} but got {got}; nothing was kept, "
                "check the proxy or mirror (HF_ENDPOINT) and run again"
            )
        log.warning("%s: corrupt, expected %s but got %s; fetching it once more", file, expected, got)
    os.replace(partial, output)
    fsync(output.parent)
    state.unlink()


def look_up(file: HubFile, patience: Patience) -> tuple[int, str]:
    """Size and hash of a file in the hub's own words: ``sha256:...`` where it is in large-file storage,
    ``git:...`` (SHA-1 of the blob) for any other. Raises `DownloadError`."""
    api = HfApi()
    where: dict[str, Any] = {"repo_type": "dataset", "revision": file.revision}
    infos = patience.call(file, lambda: api.get_paths_info(file.repo, [file.name], **where))
    if not infos:
        try:
            names = api.list_repo_files(file.repo, **where)
        except (HTTPError, OSError):
            raise DownloadError(f"{file}: no such file in the repository; look at its file list") from None
        close = difflib.get_close_matches(file.name, names, n=3)
        close += [name for name in names if Path(name).name == Path(file.name).name and name not in close]
        hint = f"; did you mean {', '.join(close[:3])}?" if close else f" (it holds {len(names)} others)"
        raise DownloadError(f"{file}: no such file in the repository{hint}")
    if isinstance(infos[0], RepoFolder):
        raise DownloadError(f"{file}: is a folder; name the files in it")
    lfs = infos[0].lfs
    return infos[0].size, f"sha256:{lfs.sha256}" if lfs else f"git:{infos[0].blob_id}"


def _transfer(file: HubFile, size: int, partial: Path, patience: Patience) -> None:
    """Append to the partial file until it has ``size`` bytes, then flush it to disk.

    A terminal shows a bar, a log a line every ten seconds.
    """
    url = hf_hub_url(file.repo, file.name, repo_type="dataset", revision=file.revision)
    with open(partial, "ab") as out:
        done = at_start = out.tell()
        free = shutil.disk_usage(partial.parent).free
        if size - done > free:
            raise OSError(errno.ENOSPC, f"{size - done:,} bytes are needed, {free:,} are free")
        if done:
            log.info("%s: resuming at %s of %s bytes", file, f"{done:,}", f"{size:,}")

        def read() -> bytes:
            end = min(done + CHUNK_BYTES, size)
            headers = {**build_hf_headers(), "Range": f"bytes={done}-{end - 1}"}
            answer = get_session().get(url, headers=headers, timeout=60.0, follow_redirects=True)
            hf_raise_for_status(answer)
            data: bytes = answer.content
            if len(data) != end - done:
                raise ConnectionError(f"asked for a range of the file, got {len(data)} bytes")
            return data

        began = spoke = time.monotonic()
        with tqdm(total=size, initial=done, unit="B", unit_scale=True, desc=file.name, disable=None) as bar:
            while done < size:
                data = patience.call(file, read)
                out.write(data)
                out.flush()
                done += len(data)
                bar.update(len(data))
                if bar.disable and time.monotonic() - spoke >= 10:
                    spoke = time.monotonic()
                    rate = (done - at_start) / (spoke - began) / 1e6
                    log.info("%s: %.0f of %.0f MB, %.1f MB/s", file, done / 1e6, size / 1e6, rate)
        os.fsync(out.fileno())


def _from_cache(file: HubFile, output: Path, patience: Patience) -> None:
    if output.exists():
        return
    where: dict[str, Any] = {"repo_type": "dataset", "revision": file.revision, "local_files_only": True}
    blob = Path(patience.call(file, lambda: hf_hub_download(file.repo, file.name, **where))).resolve()
    # A blob's name is the hash of its content, where the cache's file system has links.
    expected = f"{ {40: 'git', 64: 'sha256'}.get(len(blob.name)) }:{blob.name}"
    with replacing(output) as beside:
        shutil.copyfile(blob, beside)
        if len(blob.name) in (40, 64) and (got := _hash_like(expected, beside)) != expected:
            raise DownloadError(
                f"{file}: the cached copy {blob} is corrupt, expected {expected} but got {got}; "
                "delete it and fetch it again with a network"
            )


def _hash_like(expected: str, path: Path) -> str:
    """A file's hash, of the kind that ``expected`` is."""
    if expected.startswith("sha256:"):
        return f"sha256:{sha256(path)}"
    begun = hashlib.sha1(f"blob {path.stat().st_size}\0".encode())
    with open(path, "rb") as f:
        return f"git:{hashlib.file_digest(f, lambda: begun).hexdigest()}"


# ------------------------------------------------------------------------------------------------ errors


def cause_of(error: Exception) -> Exception:
    """The hub's answer, where libraries made another error of it."""
    inner = error.__cause__
    return inner if isinstance(inner, HTTPError) and not isinstance(error, HTTPError) else error


def status_of(error: Exception) -> int:
    return getattr(getattr(error, "response", None), "status_code", 0)


def brief(error: Exception) -> str:
    if status_of(error):
        return f"the hub answers {status_of(error)}"
    return f"{type(error).__name__}: {(str(error).strip() or 'no details').splitlines()[0]}"


def _refused(error: Exception, file: HubFile) -> DownloadError:
    return DownloadError(explain(error, file))


def explain(error: Exception, file: HubFile) -> str:
    """One line on an error of the library: the file, what is wrong, the remedy."""
    page, status = f"{constants.ENDPOINT}/datasets/{file.repo}", status_of(error)
    if isinstance(error, GatedRepoError) or status == 403:
        wrong = f"access is gated ({status}); accept the terms at {page} and set HF_TOKEN to your token"
    elif isinstance(error, RepositoryNotFoundError):
        wrong = (
            f"no such dataset repository, or a private one ({status}); check the name at {page}, "
            "and set HF_TOKEN if it is private"
        )
    elif status == 401:
        wrong = "the hub refuses the token (401); check HF_TOKEN"
    elif isinstance(error, RevisionNotFoundError):
        wrong = f"no such revision; take a commit from {page}/commits/main"
    elif isinstance(error, HFValidationError):
        wrong = f"not a repository name (owner/name): {str(error).splitlines()[0]}"
    elif constants.HF_HUB_OFFLINE:
        wrong = (
            f"HF_HUB_OFFLINE is set and the file is not in the cache {constants.HF_HUB_CACHE}; unset it, "
            "or fill that cache where there is a network"
        )
    elif isinstance(error, (EntryNotFoundError, FileNotFoundError)):
        wrong = f"no such file in the repository; look at {page}/tree/{file.revision}"
    elif status:
        wrong = f"the hub still answers {status}; run again later, what is here so far is kept"
    else:
        wrong = (
            f"cannot reach {constants.ENDPOINT} ({brief(error)}); check the network, the proxy and "
            "HF_ENDPOINT, then run again: what is here so far is kept"
        )
    return f"{file}: {wrong}"
