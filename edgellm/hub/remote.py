"""Download one file: continue what is there, check it, put it in place at once.

Beside the target lie, while it is fetched, NAME.partial and NAME.partial.json (which version of the
file the bytes are of). A fetch that is cut, stalls or is killed goes on from the last byte written.
Under its own name the file appears complete and checked.
"""

import hashlib
import http.client
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm.hub import store
from edgellm.hub.store import HubError
from edgellm.hub.transport import Interrupted, NetworkError, Piece, Useless, Wanted, ask
from edgellm.quant.files import sync_folder

__all__ = ["NetworkError", "Policy", "Wanted", "fetch", "forget", "unfinished"]

CHUNK = 1 << 18
WORTH = 1 << 16  # bytes that make a try count as progress

Report = Callable[[int, int | None], None]  # (bytes so far, of how many)


@dataclass
class Policy:
    """How patient a download is."""

    timeout: float = 20.0  # seconds without a byte
    tries: int = 6  # in a row without progress
    first_pause: float = 1.0  # doubled after each
    longest_pause: float = 30.0


POLICY = Policy()


def fetch(
    wanted: Wanted,
    target: Path,
    report: Report = lambda done, total: None,
    locks: Path | None = None,
) -> None:
    """Make ``target`` the file that is wanted. HubError in one sentence if it cannot be had.

    locks: the folder of lock files, where several caches of edgellm may share the target. With
    neither a checksum nor an ETag nothing is continued: a cut means starting again.
    """
    with store.storing(wanted.name, target.parent), store.locked(target, locks):
        if target.is_file():  # another process may have been faster
            return
        _Download(wanted, target, report).run()


def forget(target: Path) -> None:
    """Remove what an unfinished fetch of ``target`` left."""
    for path in unfinished(target):
        path.unlink(missing_ok=True)


def unfinished(target: Path) -> tuple[Path, Path]:
    """The files that lie beside ``target`` while it is fetched."""
    partial = target.with_name(f"{target.name}.partial")
    return partial, partial.with_name(f"{partial.name}.json")


class _Download:
    """One file on its way; made with the lock held."""

    def __init__(self, wanted: Wanted, target: Path, report: Report) -> None:
        self.wanted = wanted
        self.target = target
        self.report = report
        self.partial, self.state = unfinished(target)
        self.validator: str | None = None  # of the bytes that are here; unused with a checksum
        self.total = wanted.size
        self.hash = hashlib.sha256()  # of the bytes in the partial file
        self.done = 0

    def run(self) -> None:
        self._take_up()
        failures, restarts = 0, 0
        farthest = self.done  # progress is what goes beyond; so every server comes to an end
        while True:
            before = self.done
            try:
                resumed = before > 0
                self._try()
                if self._right():
                    return self._put_in_place()
                self._discard()
                if not resumed:
                    raise HubError(
                        f"What was fetched for {self.wanted.name} has another checksum than it "
                        "should. Try again; if it stays so, the file must not be used."
                    )
                raise Useless
            except Useless:
                self._discard()
                restarts += 1
                if restarts > 3:
                    raise NetworkError(
                        f"{self.wanted.name}: the file keeps changing on the server; try again "
                        "later."
                    ) from None
            except Interrupted as error:
                failures += 1
                if self.done - farthest >= WORTH:
                    failures, farthest = 0, self.done
                if failures >= POLICY.tries:
                    raise NetworkError(
                        f"{self.wanted.name} could not be fetched: {str(error).rstrip('.')}, "
                        f"{failures} times in a row; check the network, then the same command goes "
                        "on where it stopped."
                    ) from error
                self._pause(max(failures - 1, 0), error.pause)

    def _pause(self, failures: int, asked: float) -> None:
        pause = min(POLICY.first_pause * 2**failures, POLICY.longest_pause)
        # Not all who were cut at once shall come back at once.
        time.sleep(max(asked, pause * random.uniform(0.5, 1.0)))

    def _take_up(self) -> None:
        """Continue an earlier fetch if its bytes can be trusted to be of the same file."""
        try:
            size = self.partial.stat().st_size
            trusted = self.wanted.sha256 is not None or self._recall()
        except (OSError, ValueError):
            size, trusted = 0, False
        if not trusted or (self.total is not None and size > self.total):
            self._discard()
            return
        with open(self.partial, "rb") as existing:
            while chunk := existing.read(1 << 22):
                self._count(chunk)

    def _recall(self) -> bool:
        """Read which version of the file the bytes are of; False if that is not known."""
        state: Any = json.loads(self.state.read_bytes())
        if not isinstance(state, dict) or state.get("url") != self.wanted.url:
            return False
        etag, total = state.get("etag"), state.get("total")
        if not isinstance(etag, str) or not isinstance(total, int):
            return False
        self.validator, self.total = etag, total
        return True

    def _discard(self) -> None:
        forget(self.target)
        self.validator, self.total = None, self.wanted.size
        self.done, self.hash = 0, hashlib.sha256()

    def _count(self, data: bytes) -> None:
        self.done += len(data)
        if self.wanted.sha256:
            self.hash.update(data)

    def _right(self) -> bool:
        return not self.wanted.sha256 or self.hash.hexdigest() == self.wanted.sha256

    def _try(self) -> None:
        """One request, read to its end. Interrupted if it is cut."""
        if self.done and self.done == self.total:
            return  # killed between the last byte and the rename
        if self.done and not self.validator and self.wanted.sha256 is None:
            self._discard()  # nothing would tell if the file had changed meanwhile
        piece = ask(self.wanted, self.done, self.validator, POLICY.timeout)
        with piece.body:
            if piece.start != self.done:  # a whole file where a part was asked for
                self._discard()
            self._remember(piece)
            store.require_space(
                self.target.parent, max(0, (piece.total or 0) - self.done), self.wanted.name
            )
            self.report(self.done, piece.total)
            with open(self.partial, "ab", buffering=0) as out:
                self._read(piece, out)
        if piece.total is not None and self.done != piece.total:
            raise Interrupted(f"the connection ended after {self.done} of {piece.total} bytes")

    def _remember(self, piece: Piece) -> None:
        """Note what the bytes are of, before the first is written. With a checksum it decides."""
        total, self.total = self.total, piece.total
        if self.wanted.sha256 is not None:
            return
        if self.done:
            if piece.validator not in (None, self.validator) or piece.total != total:
                raise Useless  # the server did not heed If-Range
            return
        self.validator = piece.validator
        state = {"url": self.wanted.url, "etag": piece.validator, "total": piece.total}
        self.state.write_text(json.dumps(state), encoding="utf-8")

    def _read(self, piece: Piece, out: Any) -> None:
        while self.done != piece.total:
            try:
                data = piece.body.read1(CHUNK)
            except (OSError, http.client.HTTPException) as error:
                reason = str(error) or type(error).__name__
                raise Interrupted(f"{reason} after {self.done} bytes") from error
            if not data:
                return
            if piece.total is not None and self.done + len(data) > piece.total:
                self._discard()
                raise HubError(
                    f"{self.wanted.name}: the server sends more than the {piece.total} bytes it "
                    "announced; refused."
                )
            if self.done == 0 and not data.startswith(self.wanted.magic[: len(data)]):
                self._discard()
                raise HubError(
                    f"{self.wanted.name} is not a GGUF file: what {self.wanted.url} gives begins "
                    f"with {data[:8]!r}; check the address."
                )
            out.write(data)
            self._count(data)
            self.report(self.done, piece.total)

    def _put_in_place(self) -> None:
        with open(self.partial, "rb+") as handle:
            os.fsync(handle.fileno())
        # The state first: killed in between, nothing but a file that is fetched again remains.
        self.state.unlink(missing_ok=True)
        os.replace(self.partial, self.target)
        sync_folder(self.target.parent)
