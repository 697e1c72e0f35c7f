"""A file that is cut while it is mapped into memory: an error that names it, not a bus error.

Shards, checkpoints and tables are mapped, and reading a page that the file no longer has ends a process by
SIGBUS, with not a word. No Python code can catch that where it happens. So the signal gets a handler that
looks up whose page it was and says so; then the process ends, for what it was reading is gone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys


class _Info(ctypes.Structure):
    """The beginning of Linux's ``siginfo_t`` on machines of 64 bits."""

    _fields_ = (("numbers", ctypes.c_int * 4), ("address", ctypes.c_uint64))


_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.POINTER(_Info), ctypes.c_void_p)
_SA_SIGINFO = 4


class _Action(ctypes.Structure):
    """glibc's ``struct sigaction``."""

    _fields_ = (
        ("handler", _HANDLER),
        ("mask", ctypes.c_uint64 * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


@_HANDLER
def _say(_signal: int, info: ctypes._Pointer[_Info], _context: int) -> None:
    path = _mapped_at(info.contents.address)
    what = f"{path}: was cut or lost its disk while it was read; make it again" if path else "bus error"
    os.write(2, f"error: {what}, then run the same command again to go on\n".encode())
    os._exit(1)


def _mapped_at(address: int) -> str:
    """The file whose page this is; empty where it is none's."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(word, 16) for word in line.split(" ", 1)[0].split("-"))
            if begin <= address < end:
                return line.split(maxsplit=5)[5].strip() if line.count("/") else ""
    return ""


def name_files_that_are_cut() -> None:
    """Have SIGBUS say which file it was, where this is known how to do: on Linux, in 64 bits."""
    if sys.platform == "linux" and ctypes.sizeof(ctypes.c_void_p) == 8:
        action = _Action(handler=_say, flags=_SA_SIGINFO)
        ctypes.CDLL(None).sigaction(signal.SIGBUS, ctypes.byref(action), None)
