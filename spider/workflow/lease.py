"""Objects at an address of fsspec, and a lease on them that one machine has at a time.

    lease/00000003-9f2c41aa.held    the machine that writes now, renewed every minute

A machine that takes the lease gets the next number, and writes only below its own number. So a machine that
has lost the lease, such as one that was paused, changes nothing that a newer one reads.

The lease needs no conditional write, because some servers of S3 ignore the condition without an error. Each
machine writes that it asks, and then lists all leases. It proceeds only if it sees no other one, so of two
that ask at once at least one withdraws. The clock of the server tells how old a lease is.
"""

from __future__ import annotations

import json
import logging
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from spider.common.formatting import redact

log = logging.getLogger(__name__)

#: Seconds between two renewals of a lease, and the age from which on a lease is stale.
RENEW, STALE = 60.0, 180.0
TAKE = "`spider mirror take`"


class LeaseLost(ValueError):
    """Another machine has taken the lease."""


class Remote:
    """The objects at an address. Their names are relative to it."""

    def __init__(self, url: str) -> None:
        """Connect; raise `ValueError` for an address that fsspec has no package for."""
        from fsspec.core import split_protocol, url_to_fs

        self.url = url
        local = split_protocol(url)[0] in (None, "file", "local")
        try:
            self._fs, self._at = url_to_fs(url, **({"auto_mkdir": True} if local else {}))
        except ImportError as error:
            raise ValueError(
                f"mirror: {url}: a package is missing ({error}); install that, for s3:// with "
                "`pip install -e '.[mirror]'` in Spider's folder"
            ) from None
        except ValueError as error:
            raise ValueError(f"mirror: {url}: {error}; name a folder, s3://BUCKET/FOLDER or gs://") from None

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn an error of the address into one for the user."""
        try:
            yield
        except ValueError:
            raise
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"mirror: {self.url}: {redact(reason)}; check the address, its permissions and its space, "
                "and run again"
            ) from error

    def path(self, name: str) -> str:
        return f"{self._at}/{name}"

    def names(self, folder: str = "") -> list[str]:
        """Return the names of all objects in a folder, sorted."""
        self._fs.invalidate_cache()
        found = self._fs.find(f"{self._at}/{folder}".rstrip("/"))
        return sorted(name.removeprefix(self._at).lstrip("/") for name in found)

    def json(self, name: str) -> Any:
        """Return the JSON of an object; None if it is absent, or half written by a killed machine."""
        with suppress(FileNotFoundError, ValueError):
            return json.loads(self.read(name))
        return None

    def read(self, name: str) -> bytes:
        return bytes(self._fs.cat_file(self.path(name)))

    def write(self, name: str, content: bytes) -> None:
        self._fs.pipe_file(self.path(name), content)

    def upload(self, file: Path, name: str) -> None:
        self._fs.put_file(str(file), self.path(name))

    def download(self, name: str, file: Path) -> None:
        self._fs.get_file(self.path(name), str(file))

    def modified(self, name: str) -> float:
        """Return when an object was written, by the clock of the server."""
        return float(self._fs.modified(self.path(name)).timestamp())

    def remove(self, names: list[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                self._fs.rm_file(self.path(name))


class Lease:
    """The lease on the objects at an address.

    Attributes:
        token: The number of this machine, and a random part.
    """

    def __init__(self, remote: Remote, token: str = "") -> None:
        self.remote, self.token = remote, token

    @property
    def held(self) -> str:
        return f"lease/{self.token}.held"

    def acquire(self, own: list[str], *, take: bool = False) -> None:
        """Become the only machine with the lease. Wait for one that nobody renews to become stale.

        Args:
            own: Tokens of earlier processes of this machine, which have ended.
            take: Take a lease that another machine renews, too.

        Raises:
            ValueError: another machine renews its lease.
        """
        remote = self.remote
        seen: dict[str, float] = {}
        while True:
            known = [token_of(name) for name in (*remote.names("lease"), *remote.names("index"))]
            number = 1 + max((int(token.partition("-")[0]) for token in known), default=0)
            self.token = f"{number:08d}-{secrets.token_hex(4)}"
            asked = f"lease/{self.token}.asked"
            remote.write(asked, self._about())
            others = [name for name in remote.names("lease") if name != asked]
            foreign = [name for name in others if not take and token_of(name) not in own]
            times = dict(self._times([asked, *foreign]))
            fresh = [name for name in foreign if times[asked] - times.get(name, 0) < STALE]
            if not fresh:
                remote.write(self.held, self._about())
                remote.remove([asked, *others])
                return
            remote.remove([asked])
            for name in (name for name in fresh if name.endswith(".held")):
                if name not in seen:
                    log.warning(
                        "mirror: %s: waiting up to %.0f s, in which %s may renew its lease; %s does not wait",
                        remote.url, STALE, self.who(name), TAKE,
                    )  # fmt: skip
                elif seen[name] != times[name]:
                    raise ValueError(
                        f"mirror: {remote.url}: {self.who(name)} is at work and has the lease; stop the "
                        f"workflow there, or run {TAKE} here, which stops it"
                    )
                seen[name] = times[name]
            time.sleep(random.uniform(0.5, 1.5) * min(STALE / 30, 5))

    def _times(self, names: list[str]) -> Iterator[tuple[str, float]]:
        for name in names:
            with suppress(FileNotFoundError):
                yield name, self.remote.modified(name)

    def _about(self) -> bytes:
        return json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode()

    def who(self, name: str) -> str:
        """Return the machine of a lease."""
        about = self.remote.json(name) or {}
        return f"{about.get('host', 'another machine')} (process {about.get('pid', '?')})"

    def check(self) -> bool:
        """Return whether no other machine asks; raise `LeaseLost` if one has taken the lease."""
        leases = self.remote.names("lease")
        held = [name for name in (*leases, *self.remote.names("index")) if not name.endswith(".asked")]
        newer = [name for name in held if token_of(name) > self.token]
        if newer or self.held not in leases:
            who = self.who(newer[0]) if newer and newer[0] in leases else "another machine"
            raise LeaseLost(
                f"mirror: {self.remote.url}: {who} has taken the lease, so this workflow stops; continue "
                "there, or move the results folder away and run again"
            )
        return leases == [self.held]

    def renew(self, ended: threading.Event) -> None:
        """Renew the lease until the end. A caller learns from `check` that it is lost."""
        while not ended.wait(RENEW):
            with suppress(Exception):  # The address may answer again.
                self.check()
                self.remote.write(self.held, self._about())

    def release(self) -> None:
        """End the lease, so that no other machine waits."""
        with suppress(Exception):  # It becomes stale.
            self.remote.remove([f"lease/{self.token}.asked", self.held])


def token_of(name: str) -> str:
    """Return the token in the name of a lease or an index."""
    return name.split("/")[1].partition(".")[0]
