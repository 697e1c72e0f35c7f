"""How the loops over symbols are compiled: without the interpreter's lock, kept on disk beside their source,
and with no more ways to be called than are used, for each takes its time to compile."""

from __future__ import annotations

from functools import partial
from typing import Any

from numba import njit

#: What Python calls, and what only other compiled code does.
compiled: Any = partial(njit, nogil=True, cache=True, no_cfunc_wrapper=True)
inner: Any = partial(compiled, no_cpython_wrapper=True)
