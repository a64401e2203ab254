"""Python functions that read or replace a tensor in the middle of a step.

A hook is a stage of one chunk whose kernel address is a ctypes callback. It runs on a worker
thread with the GIL while the others wait. An exception is kept and ends the step; the caller of the
step gets it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

HookFunction = Callable[[NDArray[np.float32]], Any]
_CALLBACK = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)


class HookError(ValueError):
    """A hook did what a hook cannot do."""


_running: set[int] = set()  # threads that are inside a hook


def inside_hook() -> bool:
    """Whether the calling thread is running a hook; the step it belongs to cannot be waited for."""
    return threading.get_ident() in _running


class Hook:
    """``function`` gets the tensor's rows of this step, float32 [n_rows, dim], and may change them
    in place or return an array to put in their place."""

    def __init__(self, function: HookFunction, abort: Callable[[], None]) -> None:
        self._function, self._abort = function, abort
        self.rows: Callable[[], NDArray[np.float32]] | None = None  # a view of the step's rows
        self.error: BaseException | None = None
        self.is_active = True
        self._callback = _CALLBACK(self._run)
        self.address = ctypes.cast(self._callback, ctypes.c_void_p).value or 0

    def _run(self, args: int, lo: int, hi: int, tid: int) -> None:
        if not self.is_active:
            return
        _running.add(threading.get_ident())
        try:
            assert self.rows is not None
            rows = self.rows()
            result = self._function(rows)
            if result is not None:
                if np.shape(result) != rows.shape:
                    raise HookError(
                        f"A hook returned {np.shape(result)} for a tensor of {rows.shape}."
                    )
                rows[:] = result
        except BaseException as error:  # an exception must not cross native code
            self.error = error
            self._abort()
        finally:
            _running.discard(threading.get_ident())

    def raise_error(self) -> None:
        """The exception of the step just run, if there was one."""
        error, self.error = self.error, None
        if error is not None:
            raise error
