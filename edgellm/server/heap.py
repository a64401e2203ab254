"""What glibc does with memory that is free, where it is the libc: it keeps it, in a heap for each
thread. A server whose threads each had a long prompt once would hold several times what it needs.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys

_M_ARENA_MAX = -8  # of malloc.h


def share() -> None:
    """One heap for all threads, before they begin (else three times the memory after ten minutes
    of load)."""
    _glibc("mallopt", _M_ARENA_MAX, 1)


def trim() -> None:
    """Give back to the system what is free."""
    _glibc("malloc_trim", 0)


def _glibc(name: str, *arguments: int) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another libc has no such function
            getattr(ctypes.CDLL(None), name)(*arguments)
