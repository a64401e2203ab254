"""Files: positioned reads and what makes writes durable; the one place in quant that depends on the
operating system.

Positioned reads have no shared file position, so many threads may read one descriptor.
"""

import errno
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


def open_to_write(path: str) -> int:
    """A descriptor to write and read; an existing file is not touched yet. Raises OSError, also
    for a symbolic link: what it points to is not ours."""
    flags = os.O_RDWR | os.O_CREAT
    for name in ("O_CLOEXEC", "O_BINARY", "O_NOFOLLOW"):
        flags |= getattr(os, name, 0)
    return os.open(path, flags, 0o666)


def is_at(fd: int, path: str) -> bool:
    """Whether the open file still has that name."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def lock(fd: int) -> bool:
    """Hold the file for this process until it is closed; False if another one has it."""
    try:
        import fcntl
    except ImportError:  # Windows, where an open file cannot be replaced by another process
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # A file system without locks (some network mounts) is written without.
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def forget(fd: int) -> None:
    """Have what is read next come from the disk, where the system can."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Make the names in a folder durable, where the system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
