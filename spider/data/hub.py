"""Download files of a Hugging Face dataset repository, with retries, resume and a check of the content.

The library retries a request but not a download: a new process starts from zero, and corrupt bytes of the
right length are accepted. A call fails at the first 503, or waits as long as the server demands. So this
module reads a file in ranges, with the library's session, into a partial file beside its final name. A small
JSON file holds the hash of the content. A killed process continues where it stopped, and content of another
hash is discarded. After about two minutes of errors the download fails (`Patience`). The finished file is
compared with the hash that the hub states (SHA-256 for large files, the git blob id for small ones), flushed
and renamed.

A parquet file may be read in place (`RemoteFile`). Then only its footer and the configured columns of chosen
row groups are requested, at most `CHUNK_BYTES` at a time. Each answer has the requested length, and comes
from a file with the hash that the hub stated at the beginning (``X-Linked-ETag``). The footer and the pages
must decode, with the checksums of pages that have them. What does not decode is requested once more. The
SHA-256 of a whole file cannot be compared without reading all of it.

Every failure is a `DownloadError` of one line that names the file, ``repo@revision`` and the remedy. The
library's own settings apply: ``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HUB_OFFLINE`` (a file in its cache is used).

A file of the web is read in the same way. Its hash is known before, and the server gets no token.
"""

from __future__ import annotations

import difflib
import errno
import fnmatch
import hashlib
import io
import logging
import os
import random
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
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
from huggingface_hub.hf_api import RepoFile, RepoFolder
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status
from tqdm import tqdm

from spider.common.files import fsync, read_json, replacing, sha256, write_bytes, write_json

log = logging.getLogger(__name__)

T = TypeVar("T")
#: Turns an error of the library, and the name of the request, into the error that is raised.
ErrorOf = Callable[[Exception, Any], ValueError]
CHUNK_BYTES = 16 << 20
"""Bytes per request, and the most that a killed process loses."""
RETRIED_STATUS = (408, 429, 500, 502, 503, 504)
MAX_WAIT = 30.0


class DownloadError(ValueError):
    """A download failed; the message names the file, the repository and the remedy."""


@dataclass(frozen=True)
class HubFile:
    """Address of a file: repository (``owner/name``), commit (or branch or tag), and path."""

    repo: str
    revision: str
    name: str

    def __str__(self) -> str:
        return f"{self.name} of {self.repo}@{self.revision}"

    def request(self) -> tuple[str, dict[str, str]]:
        """Return the address of the content, and the headers of a request."""
        url = hf_hub_url(self.repo, self.name, repo_type="dataset", revision=self.revision)
        return url, build_hf_headers()


@dataclass(frozen=True)
class WebFile:
    """Address of a file on any server, and the SHA-256 of its content."""

    url: str
    sha256: str

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    def __str__(self) -> str:
        return self.url

    def request(self) -> tuple[str, dict[str, str]]:
        """Return the address of the content, and the headers of a request."""
        return self.url, {"Accept-Encoding": "identity"}


PublicFile = HubFile | WebFile


def at(address: str) -> PublicFile:
    """Return the file at an address (`Config.download`)."""
    url, _, digest = address.partition("#sha256=")
    if digest:
        return WebFile(url, digest)
    repo, _, inside = address.removeprefix("hf://datasets/").partition("@")
    return HubFile(repo, *inside.split("/", 1))


@dataclass(frozen=True)
class Patience:
    """Failed attempts until an error is raised, and the first wait in seconds (doubled, jittered, capped).

    The defaults wait about two minutes in all.
    """

    attempts: int = 9
    backoff: float = 1.0

    def call(self, what: Any, attempt: Callable[[], T], error_of: ErrorOf | None = None) -> T:
        """Run ``attempt`` until it succeeds; errors of the network and the server are retried.

        Raises what ``error_of`` returns (default: `download_error`) if retries fail or cannot help.
        """
        failures = 0
        while True:
            try:
                return attempt()
            except (HTTPError, HFValidationError, FileNotFoundError, ConnectionError, TimeoutError) as error:
                cause = cause_of(error)
                hopeless = isinstance(cause, (HFValidationError, FileNotFoundError))
                if status_of(cause):
                    hopeless = status_of(cause) not in RETRIED_STATUS
                failures += 1
                if hopeless or failures >= self.attempts:
                    raise (error_of or download_error)(cause, what) from None
                wait = min(MAX_WAIT, self.backoff * 2 ** (failures - 1)) * random.uniform(0.5, 1.0)
                log.warning("%s: %s; trying again in %.1f s", what, brief(cause), wait)
                time.sleep(wait)


PATIENCE = Patience()
#: Patience with a hub that is only looked at.
HURRY = Patience(attempts=3, backoff=0.3)


def download_file(file: PublicFile, output: Path, patience: Patience = PATIENCE) -> None:
    """Download a file to ``output``, unless the complete file exists.

    A second process waits for the first. Raises `DownloadError`: missing file, revision or repository; no
    access; no network; server down; wrong hash twice; disk full or not writable.
    """
    with writing(file, output):
        if not constants.HF_HUB_OFFLINE or isinstance(file, WebFile):
            _from_server(file, output, patience)
        elif not output.exists():
            blob = cached(file, patience)
            with replacing(output) as temporary:
                shutil.copyfile(blob, temporary)


@contextmanager
def writing(what: Any, output: Path) -> Iterator[None]:
    """Hold the lock of an output, and raise `DownloadError` for an error of the disk."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(output.with_name(f".{output.name}.lock"))
        try:
            acquired = lock.acquire(blocking=False)
        except Timeout:
            log.info("%s: another process is downloading it; waiting", what)
            acquired = lock.acquire()
        with acquired:
            yield
    except OSError as error:
        wrong = f"cannot write {output} ({error.strerror or error}); check the folder and its permissions"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            wrong = f"no space left in {output.parent} ({error.strerror}); free some and run again to resume"
        raise DownloadError(f"{what}: {wrong}") from None


def _from_server(file: PublicFile, output: Path, patience: Patience) -> None:
    size, expected = look_up(file, patience)
    if output.exists():
        if _hash_like(expected, output) == expected:
            log.info("%s: already downloaded", file)
            return
        log.warning("%s: %s has other content; it will be replaced", file, output)
    part = output.with_name(f".{output.name}.partial")
    state = output.with_name(f".{output.name}.partial.json")
    for corrupt_before in (False, True):
        if part.exists() and (not state.exists() or read_json(state).get("hash") != expected):
            log.warning("%s: discarding a partial download of other content", file)
            part.unlink()
        write_json(state, {"size": size, "hash": expected})
        _transfer(file, size, expected, part, patience)
        got = _hash_like(expected, part)
        if got == expected:
            break
        part.unlink()
        if corrupt_before:
            state.unlink()
            replaced = "; if its publisher replaced the file, correct its digest in downloads"
            raise DownloadError(
                f"{file}: corrupt twice, expected {expected} but got {got}; nothing was kept, check the "
                f"proxy or mirror (HF_ENDPOINT) and run again{replaced * isinstance(file, WebFile)}"
            )
        log.warning("%s: corrupt, expected %s but got %s; downloading it once more", file, expected, got)
    os.replace(part, output)
    fsync(output.parent)
    state.unlink()


def look_up(file: PublicFile, patience: Patience) -> tuple[int, str]:
    """Return the size and the hash of a file as the hub states them.

    The hash is ``sha256:...`` for a file in large-file storage and of the web, and ``git:...`` (SHA-1 of the
    blob) otherwise. Raises `DownloadError`.
    """
    if isinstance(file, WebFile):
        answer = patience.call(file, partial(_answer, "HEAD", file))
        return int(answer.headers["Content-Length"]), f"sha256:{file.sha256}"
    api = HfApi()
    where: dict[str, Any] = {"repo_type": "dataset", "revision": file.revision}
    infos = patience.call(file, lambda: api.get_paths_info(file.repo, [file.name], **where))
    if not infos:
        try:
            names = api.list_repo_files(file.repo, **where)
        except (HTTPError, OSError):
            raise DownloadError(f"{file}: no such file in the repository; see its file list") from None
        close = difflib.get_close_matches(file.name, names, n=3)
        close += [name for name in names if Path(name).name == Path(file.name).name and name not in close]
        hint = f"; did you mean {', '.join(close[:3])}?" if close else f" (it has {len(names)} others)"
        raise DownloadError(f"{file}: no such file in the repository{hint}")
    if isinstance(infos[0], RepoFolder):
        raise DownloadError(f"{file}: is a folder; name the files in it")
    info = infos[0]
    return info.size, f"sha256:{info.lfs.sha256}" if info.lfs else f"git:{info.blob_id}"


def matching(repo: str, revision: str, patterns: Sequence[str]) -> tuple[str, list[str]]:
    """Return the commit of a revision, and the names of its files that match globs, sorted.

    ``*`` also matches slashes, as on the hub. Raises `DownloadError`, also where a glob matches nothing.
    """
    api = HfApi()
    where = HubFile(repo, revision, patterns[0])
    info = HURRY.call(where, lambda: api.dataset_info(repo, revision=revision))
    names = [one.rfilename for one in info.siblings or []]
    found: set[str] = set()
    for pattern in patterns:
        matches = fnmatch.filter(names, pattern)
        if not matches:
            page = f"{constants.ENDPOINT}/datasets/{repo}/tree/{revision}"
            raise DownloadError(f"{repo}@{revision}: no file matches {pattern}; see {page}")
        found |= {*matches}
    return str(info.sha), sorted(found)


def _answer(method: str, file: PublicFile, **more: str) -> Any:
    """Request a file once with these headers, and return the answer."""
    url, headers = file.request()
    answer = get_session().request(method, url, headers=headers | more, timeout=60.0, follow_redirects=True)
    hf_raise_for_status(answer)
    return answer


def read_range(file: PublicFile, begin: int, end: int, expected: str) -> bytes:
    """Request a range of a file once.

    A shorter answer is a `ConnectionError`, which is retried. An answer of a file with another hash is a
    `DownloadError`, where the hub states the hash.
    """
    answer = _answer("GET", file, Range=f"bytes={begin}-{end - 1}")
    for one in [*answer.history, answer] if isinstance(file, HubFile) else ():
        tag = one.headers.get("X-Linked-ETag", "").removeprefix("W/").strip('"')
        if tag and tag != expected.partition(":")[2]:
            raise DownloadError(
                f"{file}: changed on the hub during the download (it was {expected}, it is {tag}); name a "
                "commit as revision and run again"
            )
    data: bytes = answer.content
    if len(data) != end - begin:
        raise ConnectionError(f"requested {end - begin} bytes of the file, got {len(data)}")
    return data


def _transfer(file: PublicFile, size: int, expected: str, part: Path, patience: Patience) -> None:
    """Append to the partial file until it has ``size`` bytes, then flush it to disk.

    A terminal shows a progress bar, a log file a line every ten seconds.
    """
    with open(part, "ab") as out:
        done = at_start = out.tell()
        free = shutil.disk_usage(part.parent).free
        if size - done > free:
            raise OSError(errno.ENOSPC, f"{size - done:,} bytes are needed, {free:,} are free")
        if done:
            log.info("%s: resuming at %s of %s bytes", file, f"{done:,}", f"{size:,}")

        began = logged = time.monotonic()
        with tqdm(total=size, initial=done, unit="B", unit_scale=True, desc=file.name, disable=None) as bar:
            while done < size:
                end = min(done + CHUNK_BYTES, size)
                data = patience.call(file, partial(read_range, file, done, end, expected))
                out.write(data)
                out.flush()
                done += len(data)
                bar.update(len(data))
                if bar.disable and time.monotonic() - logged >= 10:
                    logged = time.monotonic()
                    rate = (done - at_start) / (logged - began) / 1e6
                    log.info("%s: %.0f of %.0f MB, %.1f MB/s", file, done / 1e6, size / 1e6, rate)
        os.fsync(out.fileno())


def in_cache(file: HubFile, patience: Patience) -> Path:
    """Return the path of a file in the library's cache. Raises `DownloadError` if it is absent."""
    where: dict[str, Any] = {"repo_type": "dataset", "revision": file.revision, "local_files_only": True}
    return Path(patience.call(file, lambda: hf_hub_download(file.repo, file.name, **where)))


def cached(file: HubFile, patience: Patience) -> Path:
    """Return the path of a file in the library's cache. Raises `DownloadError` if it is absent or corrupt."""
    found = in_cache(file, patience)
    blob = found.resolve()
    # The first link leads to the hub's hash. For a file of Xet that is a link too, to a hash of another kind.
    # Without links the cache does not know the hash.
    name = found.readlink().name if found.is_symlink() else ""
    kind = {40: "git", 64: "sha256"}.get(len(name))
    expected = f"{kind}:{name}"
    if kind and (got := _hash_like(expected, blob)) != expected:
        raise DownloadError(
            f"{file}: the cached copy {blob} is corrupt, expected {expected} but got {got}; delete it and "
            "download it again with a network"
        )
    return blob


def _hash_like(expected: str, path: Path) -> str:
    """Return a file's hash of the kind of ``expected``."""
    if expected.startswith("sha256:"):
        return f"sha256:{sha256(path)}"
    sha1 = hashlib.sha1(f"blob {path.stat().st_size}\0".encode())
    with open(path, "rb") as content:
        return f"git:{hashlib.file_digest(content, lambda: sha1).hexdigest()}"


# ------------------------------------------------------------------------------------------------ ranges


class RemoteFile(io.RawIOBase):
    """A file of the hub, whose ranges are requested, or read from a folder where they are stored.

    Without a folder none is stored. Raises `DownloadError` like `look_up`.
    """

    def __init__(self, file: HubFile, folder: Path | None, patience: Patience) -> None:
        super().__init__()
        self.file = file
        self._size, self._expected = look_up(file, patience)
        self.used: list[Path] = []
        """Ranges that were read since the list was cleared."""
        self._folder = folder and folder / self._expected.partition(":")[2]
        self._patience = patience
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        begin = self._at
        last = min(begin + len(view), self._size)
        while self._at < last:
            end = min(self._at + CHUNK_BYTES, last)
            view[self._at - begin : end - begin] = self._range(self._at, end)
            self._at = end
        return self._at - begin

    def __str__(self) -> str:
        return str(self.file)

    def parquet(self, footer: pq.FileMetaData | None = None) -> pq.ParquetFile:
        """Return the file as parquet, of which each request reads a column of a row group or a part of it.

        A known ``footer`` is not requested. Raises `DownloadError` if it does not decode.
        """
        options: dict[str, Any] = {"pre_buffer": False, "buffer_size": CHUNK_BYTES, "metadata": footer}
        opened = partial(pq.ParquetFile, self, page_checksum_verification=True, **options)
        return decoded(self, "the footer", opened)

    def _range(self, begin: int, end: int) -> bytes:
        path = self._folder and self._folder / f"{begin}-{end}"
        if path:
            self.used.append(path)
            if path.exists():
                return path.read_bytes()
        data = self._patience.call(self.file, partial(read_range, self.file, begin, end, self._expected))
        if path:
            write_bytes(path, data)
        return data


def decoded(remote: RemoteFile, what: str, read: Callable[[], T]) -> T:
    """Return what ``read`` decodes. Ranges that do not decode are requested once more."""
    for again in (False, True):
        remote.used.clear()
        try:
            return read()
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno:
                raise
            for path in remote.used:
                path.unlink(missing_ok=True)
            problem = f"{remote.file}: {what} does not decode ({str(error).splitlines()[0]})"
            if again:
                remedy = "if it happens again, the file is damaged or not a parquet file: leave it out"
                raise DownloadError(f"{problem}, twice; run again, and {remedy}") from None
            log.warning("%s; downloading it once more", problem)
    raise AssertionError


def size_of(files: Collection[PublicFile]) -> int:
    """Return the size of files of any repositories and of the web; raise like `survey`."""
    web = sum(look_up(file, HURRY)[0] for file in files if isinstance(file, WebFile))
    repositories = defaultdict(list)
    for file in files:
        if isinstance(file, HubFile):
            repositories[file.repo, file.revision].append(file)
    return web + sum(survey(own, None)[0] for own in repositories.values())


def survey(files: list[HubFile], table: HubFile | None) -> tuple[int, pa.Schema | None]:
    """Return the size of files of one dataset repository, and the columns of the parquet file ``table``.

    This reads no more than the end of that file. Offline it reads the copies in the cache.

    Raises:
        DownloadError: the hub refuses, within seconds, because retries are for a download.
    """
    if constants.HF_HUB_OFFLINE:
        paths = {file: in_cache(file, HURRY) for file in files}
        return sum(map(os.path.getsize, paths.values())), pq.read_schema(paths[table]) if table else None
    where: dict[str, Any] = {"repo_type": "dataset", "revision": files[0].revision}
    names = [file.name for file in files]
    infos = HURRY.call(files[0], lambda: HfApi().get_paths_info(files[0].repo, names, **where))
    sizes = {info.path: info.size for info in infos if isinstance(info, RepoFile)}
    for file in files:
        if file.name not in sizes:
            look_up(file, HURRY)  # raises
    schema = RemoteFile(table, None, HURRY).parquet().schema_arrow if table else None
    return sum(sizes.values()), schema


# ------------------------------------------------------------------------------------------------ errors


def cause_of(error: Exception) -> Exception:
    """Return the hub's response, if a library wrapped it in another error."""
    inner = error.__cause__
    return inner if isinstance(inner, HTTPError) and not isinstance(error, HTTPError) else error


def status_of(error: Exception) -> int:
    return getattr(getattr(error, "response", None), "status_code", 0)


def brief(error: Exception) -> str:
    if status_of(error):
        return f"the hub responds {status_of(error)}"
    return f"{type(error).__name__}: {(str(error).strip() or 'no details').splitlines()[0]}"


def download_error(error: Exception, file: PublicFile) -> DownloadError:
    """Return an error of the library as one line: the file, what is wrong, the remedy."""
    if isinstance(file, WebFile):
        wrong = f"the server responds {status_of(error)}" if status_of(error) else brief(error)
        remedy = "run again to resume; if it moved, correct its address in downloads, or put it in its place"
        return DownloadError(f"{file}: {wrong}; {remedy}")
    page = f"{constants.ENDPOINT}/datasets/{file.repo}"
    status = status_of(error)
    if isinstance(error, GatedRepoError) or status == 403:
        wrong = f"access is gated ({status}); accept the terms at {page} and set HF_TOKEN to your token"
    elif isinstance(error, RepositoryNotFoundError):
        wrong = (
            f"no such dataset repository, or a private one ({status}); check the name at {page}, "
            "and set HF_TOKEN if it is private"
        )
    elif status == 401:
        wrong = "the hub rejects the token (401); set HF_TOKEN to a valid one"
    elif isinstance(error, RevisionNotFoundError):
        wrong = f"no such revision; take a commit from {page}/commits/main"
    elif isinstance(error, HFValidationError):
        wrong = f"not a repository name (owner/name): {str(error).splitlines()[0]}"
    elif constants.HF_HUB_OFFLINE:
        wrong = (
            f"HF_HUB_OFFLINE is set and the file is not in the cache {constants.HF_HUB_CACHE}; unset it, "
            "or fill that cache with a network"
        )
    elif isinstance(error, (EntryNotFoundError, FileNotFoundError)):
        wrong = f"no such file in the repository; see {page}/tree/{file.revision}"
    elif status:
        wrong = f"the hub still responds {status}; run again later to resume"
    else:
        wrong = (
            f"cannot reach {constants.ENDPOINT} ({brief(error)}); check the network, the proxy and "
            "HF_ENDPOINT, then run again to resume"
        )
    return DownloadError(f"{file}: {wrong}")
