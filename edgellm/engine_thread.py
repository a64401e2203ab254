"""The thread that computes: steps of one model while there is work, asleep while there is none.

Requests come through an inbox, so that nobody waits for a running step to hand one over. After each
step all readers that wait for what came out are woken, by one call for each event loop.

Nothing that goes wrong with a request or a step ends the thread. It ends when it is stopped, or
when the model can compute no more; whatever is open then fails with one EngineError.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from edgellm.llm import LLM
from edgellm.loop import EngineError
from edgellm.request import Request
from edgellm.sequence import Piece, Sequence
from edgellm.turns import Turns

_REST = 0.001  # seconds between steps that found nothing to compute although requests wait
_SLOW_READERS = 0.02  # the same, while all that runs waits for readers
_JOIN = 10.0  # seconds that the end of the process waits for the thread


class EngineThread:
    """Works for ``llm`` from ``start`` to ``stop``. A *stall* is work that makes no progress for
    ``stall_seconds``. Its steps take ``turns`` with those of other engines."""

    def __init__(self, llm: LLM, stall_seconds: float, turns: Turns | None = None) -> None:
        self.llm, self.stall_seconds = llm, stall_seconds
        self._turns = turns or contextlib.nullcontext()
        self._pid = os.getpid()
        self._condition = threading.Condition()
        self._inbox: deque[Request] = deque()
        self._open: dict[Request, None] = {}  # queued or running
        self._news: deque[Request] = deque()
        self._deadline: float | None = None  # of what is open, once the engine is to stop
        self._error: EngineError | None = None  # why the thread has ended
        self._step_began = 0.0  # 0: between steps
        self._progress = self._counted_stall = time.perf_counter()
        # A daemon: it must not keep the process from ending. AsyncLLM stops it at exit, before
        # the interpreter is taken down under it.
        self._thread = threading.Thread(target=self._run, name="edgellm-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # ---- for any thread -------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Hand over a request; returns at once. EngineError when nobody would work on it."""
        self.check()
        with self._condition:
            self.check()
            if not self._open:
                self._progress = time.perf_counter()
            self._open[request] = None
            self._inbox.append(request)
            self._condition.notify_all()

    def check(self) -> None:
        """Raise EngineError unless requests are taken."""
        if os.getpid() != self._pid:  # before any lock, which another thread may have held
            raise EngineError("An engine cannot be used after a fork; load the model anew.")
        if self._error is not None:
            raise self._error
        if self._deadline is not None:
            raise EngineError("This engine is closed.")

    def wake(self) -> None:
        """Look at once whether a request was given up."""
        with self._condition:
            self._condition.notify_all()

    def heard(self, request: Request, is_over: bool) -> None:
        """A request has a new piece, or is over; called inside a step."""
        if is_over:
            self._open.pop(request, None)
        self._news.append(request)

    def lose(self, error: EngineError) -> None:
        """End the wait of everybody who reads from here: the running step does not end."""
        for request in list(self._open):
            request.lose(error)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and os.getpid() == self._pid and self.llm.is_alive

    @property
    def is_closing(self) -> bool:
        return self._deadline is not None

    @property
    def n_open(self) -> int:
        """Requests that wait or run."""
        return len(self._open)

    @property
    def step_seconds_now(self) -> float:
        """How long the running step has taken so far; 0 between steps."""
        began = self._step_began
        return time.perf_counter() - began if began else 0.0

    @property
    def idle_seconds(self) -> float:
        """How long there has been work without a step that computed any of it; 0 without work."""
        return time.perf_counter() - self._progress if self._open else 0.0

    @property
    def is_stalled(self) -> bool:
        if self.idle_seconds <= self.stall_seconds:
            return False
        self._count_stall()
        return True

    def _count_stall(self) -> None:
        """Once for each, whether the first to see it is a reader or the thread when it is over."""
        with self._condition:
            if self._counted_stall != self._progress:
                self._counted_stall = self._progress
                self.llm.metrics.stalls += 1

    def stop(self, drain: float = 0.0) -> None:
        """Take no more requests, finish what can be finished within ``drain`` seconds, fail the
        rest; returns when the thread has ended."""
        if os.getpid() != self._pid:
            return
        with self._condition:
            self._deadline = time.perf_counter() + drain
            self._condition.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @staticmethod
    def stop_at_exit(thread: EngineThread) -> None:
        """As ``stop``, with limited patience: the end of a process must not hang."""
        if os.getpid() != thread._pid:
            return
        if thread._condition.acquire(timeout=1.0):
            thread._deadline = 0.0
            thread._condition.notify_all()
            thread._condition.release()
        if threading.current_thread() is not thread._thread:
            thread._thread.join(_JOIN)

    # ---- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        error = EngineError("The engine was closed before the request was done.")
        try:
            while self._wait_for_work():
                self._take_in()
                computed = self._step()
                self._deliver()
                if not computed and self._open:
                    seconds = _REST
                    if self.llm.scheduler.is_resting:  # readers are slow, not the engine
                        self._progress, seconds = time.perf_counter(), _SLOW_READERS
                    with self._condition:
                        self._condition.wait(seconds)
        except EngineError as reason:
            error = reason
        except BaseException as reason:  # a fault of ours: requests must not wait for ever
            error = EngineError(f"The engine has failed: {reason!r}.")
            raise
        finally:
            with self._condition:  # what is submitted from here on is refused
                self._error = error if self._deadline is None else EngineError(
                    "This engine is closed."
                )  # fmt: skip
            while self._open:
                self._fail([s for request in list(self._open) for s in request.choices], error)
            self._deliver()

    def _wait_for_work(self) -> bool:
        """False when it is time to end."""
        with self._condition:
            while not self._open and self._deadline is None:
                self._condition.wait()
            if self._deadline is None:
                return True
            return bool(self._open) and time.perf_counter() < self._deadline

    def _take_in(self) -> None:
        while self._inbox:
            request = self._inbox.popleft()
            try:
                self.llm.enqueue(request.choices)
            except Exception as error:
                self._check_model()
                self._fail(request.choices, error)

    def _step(self) -> bool:
        """One step; False when it found nothing to compute."""
        try:
            with self._turns:
                self._step_began = time.perf_counter()
                computed = self.llm.step()
        except BaseException as error:  # also SystemExit, from a hook
            self._check_model()
            self._survive(error)
            computed = True
        finally:
            self._step_began = 0.0
        self._check_model()
        if computed:
            if self.idle_seconds > self.stall_seconds:
                self._count_stall()
            self._progress = time.perf_counter()
        return computed

    def _check_model(self) -> None:
        if not self.llm.is_alive:
            raise EngineError("The model was closed, or its threads have ended.")

    def _survive(self, error: BaseException) -> None:
        """An exception that no request is to blame for: what runs fails, so that something ends
        each time, and the others go on."""
        self.llm.metrics.step_errors += 1
        if not isinstance(error, Exception):
            error = EngineError(f"A step ended with {error!r}.")
        choices = [s for request in list(self._open) for s in request.choices]
        running = [s for s in choices if s.row >= 0]
        self._fail(running or choices, error)

    def _fail(self, choices: list[Sequence], error: Exception) -> None:
        try:
            self.llm.fail(choices, error)
        except Exception:  # the accounts are beyond repair; the readers have to know all the same
            for choice in choices:
                if choice.finish_reason is None:
                    choice.error, choice.finish_reason = error, "error"
                    choice.pieces.append(Piece("", None, "error", choice=choice.choice))

    def _deliver(self) -> None:
        """Wake everybody who waits for what has come."""
        waiting: dict[asyncio.AbstractEventLoop, list[tuple[Request, Callable[[], object]]]] = {}
        while self._news:
            request = self._news.popleft()
            waiter = request.waiter
            if waiter is None or not request.has_news:
                continue
            request.waiter = None
            if waiter.loop is None:
                waiter.wake()
            else:
                waiting.setdefault(waiter.loop, []).append((request, waiter.wake))
        for loop, those in waiting.items():
            try:
                loop.call_soon_threadsafe(_wake, [wake for _, wake in those])
            except RuntimeError:  # the loop is closed: nobody will ever read them
                for request, _ in those:
                    request.abort()


def _wake(readers: list[Callable[[], object]]) -> None:
    for wake in readers:
        with contextlib.suppress(Exception):  # one must not keep the others asleep
            wake()
