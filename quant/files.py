"""Reading a file at an offset: the one place in quant that depends on the operating system.

Positioned reads have no shared file position, so many threads may read one descriptor.
"""

import os
import threading

_lock = threading.Lock()


def open_to_read(path: str) -> int:
    """A descriptor. Raises OSError, or ValueError for a NUL in the path."""
    flags = os.O_RDONLY
    # O_NONBLOCK: opening a FIFO would otherwise wait for a writer before we can see what it is.
    for name in ("O_CLOEXEC", "O_NONBLOCK", "O_BINARY"):  # each where the system has it
        flags |= getattr(os, name, 0)
    return os.open(path, flags)


if hasattr(os, "preadv"):

    def read_at(fd: int, out: memoryview, offset: int) -> int:
        """Fill `out` (bytes) from offset as far as one call goes; 0 at the end of the file."""
        return os.preadv(fd, [out], offset)

else:  # Windows

    def read_at(fd: int, out: memoryview, offset: int) -> int:
        with _lock:
            os.lseek(fd, offset, os.SEEK_SET)
            piece = os.read(fd, len(out))
        out[: len(piece)] = piece
        return len(piece)


def fill(fd: int, out: memoryview, offset: int) -> int:
    """Fill `out` (bytes) from offset; returns the bytes read, fewer only where the file ends."""
    done = 0
    while done < len(out):
        n = read_at(fd, out[done:], offset + done)
        if n == 0:
            break
        done += n
    return done
