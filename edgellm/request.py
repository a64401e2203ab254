"""A request that an engine's thread works on, and the one who waits for it, wherever he runs.

Pieces pile up on the request's choices until they are taken; a reader that has taken all says where
it waits: in an event loop or in a thread of its own. A stream that nobody reads holds at most the
``max_tokens`` of its request (or what the context has room for), and its seat until then.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from edgellm.sequence import Completion, Piece, Sequence, completion_of


class Listener(Protocol):
    """Who is told about requests, in the thread that computes."""

    def heard(self, request: Request, is_over: bool) -> None: ...


@dataclass(slots=True)
class Waiter:
    """A reader that waits for the next piece, or for the end. ``wake`` is called in ``loop``, or by
    the engine's thread itself where there is none."""

    loop: asyncio.AbstractEventLoop | None
    wake: Callable[[], object]
    until_end: bool


class _Pieces(deque[Piece]):
    """What a choice has not been asked for yet; its request hears of every new one."""

    def __init__(self, request: Request) -> None:
        super().__init__()
        self._request = request

    def append(self, piece: Piece, /) -> None:
        super().append(piece)
        self._request._news(piece)


@dataclass(frozen=True, slots=True)
class Remark:
    """What became of a request: a line for people, the same as numbers for programs."""

    text: str
    facts: dict[str, object]


class Request:
    """``choices`` answer one prompt. One reader at a time: pieces as they come (``stream`` in an
    event loop, iteration in a thread), or ``completions`` at the end."""

    def __init__(self, choices: list[Sequence], listener: Listener) -> None:
        self.choices, self._listener = choices, listener
        self.waiter: Waiter | None = None
        self.remark: Callable[[], Remark] | None = None  # its owner's: what a log says of its end
        self._lost: Exception | None = None
        self._n_open = len(choices)
        for choice in choices:
            choice.pieces = _Pieces(self)

    # ---- the engine's side ----------------------------------------------------------------------

    def _news(self, piece: Piece) -> None:
        if piece.finish_reason is not None:
            self._n_open -= 1
        self._listener.heard(self, self.is_done)

    @property
    def has_news(self) -> bool:
        """Whether what the reader waits for is there."""
        waiter = self.waiter
        return self.is_done or (waiter is not None and not waiter.until_end)

    # ---- for anybody ----------------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        """All choices are finished, in whatever way."""
        return not self._n_open

    @property
    def is_cancelled(self) -> bool:
        return self.choices[0].is_cancelled

    def abort(self) -> None:
        """Give the request up, from any thread. What it holds is free after the running step."""
        for choice in self.choices:
            choice.cancel()

    def lose(self, error: Exception) -> None:
        """End the wait of its reader with an error, from any thread: the engine is stuck. What it
        holds is free when the engine goes on."""
        self._lost = error
        self.abort()
        waiter = self.waiter
        if waiter is not None and waiter.loop is None:
            waiter.wake()
        elif waiter is not None and waiter.loop is not None:
            waiter.loop.call_soon_threadsafe(waiter.wake)

    def completions(self) -> list[Completion]:
        """The finished choices, if no piece was taken. Raises what a choice ended with."""
        for choice in self.choices:
            choice.raise_error()
        return [completion_of(choice) for choice in self.choices]

    def take(self) -> Piece | None:
        """A piece that is there and was not taken yet."""
        for choice in self.choices:
            if choice.pieces:
                return choice.pieces.popleft()
        return None

    def _is_over(self) -> bool:
        """Nothing will come any more; then an error is raised."""
        if self._lost is not None:
            raise self._lost
        if not self.is_done or any(choice.pieces for choice in self.choices):
            return False
        for choice in self.choices:
            choice.raise_error()
        return True

    def _is_there(self, until_end: bool) -> bool:
        there = not until_end and any(choice.pieces for choice in self.choices)
        return self.is_done or there or self._lost is not None

    # ---- in an event loop -----------------------------------------------------------------------

    def stream(self) -> Stream:
        """Its pieces for ``async for``."""

        async def this() -> Request:
            return self

        return Stream(this)

    async def until(self, end: bool) -> None:
        """Wait for the next piece, or for the end. Cancelling this aborts the request."""
        if self._is_there(end):
            return
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self.waiter = Waiter(loop, lambda: _settle(future), end)
        try:
            if not self._is_there(end):  # it may have come just before the waiter was seen
                await future
        except BaseException:
            self.abort()
            raise
        finally:
            self.waiter = None

    async def next(self) -> Piece | None:
        """The next piece; None after the last. Raises what a choice ended with."""
        while True:
            piece = self.take()
            if piece is not None:
                return piece
            if self._is_over():
                return None
            await self.until(end=False)

    # ---- in a thread ----------------------------------------------------------------------------

    def wait(self, end: bool = True, timeout: float | None = None) -> bool:
        """Block until the end, or the next piece; False after ``timeout`` seconds."""
        if self._is_there(end):
            return True
        event = threading.Event()
        self.waiter = Waiter(None, event.set, end)
        try:
            return self._is_there(end) or event.wait(timeout)
        finally:
            self.waiter = None

    def __iter__(self) -> Iterator[Piece]:
        """Leaving the loop early aborts the request."""
        try:
            while True:
                piece = self.take()
                if piece is not None:
                    yield piece
                elif self._is_over():
                    return
                else:
                    self.wait(end=False)
        finally:
            if not self.is_done:
                self.abort()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():  # its reader may have been cancelled
        future.set_result(None)


class Stream:
    """Pieces of all choices of a request, in the order in which they come. Leaving the loop early,
    or cancelling the task that waits in it, aborts the request; where somebody else may keep a
    stream alive, as a traceback does, ``async with`` ends it for certain."""

    def __init__(self, opening: Callable[[], Awaitable[Request]]) -> None:
        self._opening: Callable[[], Awaitable[Request]] | None = opening
        self.request: Request | None = None  # from the first piece on

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        if self._opening is not None:
            opening, self._opening = self._opening, None
            self.request = await opening()
        piece = await self.request.next() if self.request is not None else None
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def aclose(self) -> None:
        """Abort what is not finished; nothing comes afterwards."""
        self._opening = None
        self._leave()
        self.request = None

    def _leave(self) -> None:
        if self.request is not None and not self.request.is_done:
            self.request.abort()

    def __del__(self) -> None:
        self._leave()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        await self.aclose()
