"""What serves one model: its engine, name and limits."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from starlette.types import Receive

from edgellm.chat import ChatTemplate
from edgellm.engine import AsyncLLM
from edgellm.metrics import Metrics
from edgellm.request import Request
from edgellm.request_options import RequestOptions
from edgellm.sampling_params import SamplingParams
from edgellm.server.errors import ApiError

T = TypeVar("T")
log = logging.getLogger("edgellm.server")
STALL_SECONDS = 9.0  # without progress: no step takes so long, and readiness ends within 10 s
# With more the first token comes more than twice as late under overload as at capacity.
WAITING_PER_SEAT = 3
_SAMPLES = 5  # seconds that a rate is of


class Rate:
    """Generated tokens a second, of the last few, if ``sample`` is called every second."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._samples = deque([self._now()], _SAMPLES + 1)

    def _now(self) -> tuple[float, int]:
        return time.monotonic(), self._metrics.generation_tokens

    def sample(self) -> None:
        self._samples.append(self._now())

    @property
    def per_second(self) -> float:
        (begun, before), (now, count) = self._samples[0], self._now()
        return (count - before) / max(now - begun, 1.0)


@dataclass
class Service:
    """``max_queue`` requests and ``max_queue_tokens`` of their prompts may wait beside those that
    run. The seconds are the longest that a request may take: to be begun, to its first token, in
    all; None: any time."""

    engine: AsyncLLM
    model: str
    template: ChatTemplate | None
    defaults: SamplingParams = SamplingParams(max_tokens=None)
    max_queue: int = 64
    max_queue_tokens: int = 1 << 20
    queue_seconds: float | None = None
    first_token_seconds: float | None = None
    request_seconds: float | None = 3600.0
    slot_dir: Path | None = None  # where the caches of slots may be saved
    allow_special: bool = False  # texts of control tokens in messages and prompts are those tokens
    is_draining: bool = False

    def __post_init__(self) -> None:
        self.rate = Rate(self.engine.metrics)

    @property
    def n_room(self) -> int:
        """Answers that could still be asked for."""
        return self.engine.llm.max_num_seqs + self.max_queue - self.engine.n_open

    @property
    def n_waiting(self) -> int:
        return max(0, self.engine.n_open - self.engine.llm.max_num_seqs)

    def check_room(self, n: int, n_tokens: int) -> None:
        """429 when too much waits already, 400 for what could never be taken."""
        if not self.engine.is_alive or self.is_draining:
            raise ApiError(503, "The server is not taking requests.")
        room, waiting = self.engine.llm.max_num_seqs + self.max_queue, self.n_waiting
        if n > room:
            raise ApiError(400, f"{n} answers are asked for at once; at most {room} can be.")
        if n > self.n_room:
            raise ApiError(429, f"{waiting} requests wait already; try again later.")
        if waiting and self.engine.n_queued_tokens + n_tokens > self.max_queue_tokens:
            raise ApiError(429, "Too many tokens of prompts wait already; try again later.")

    async def open(
        self, tokens: list[int], params: SamplingParams, options: RequestOptions, n: int
    ) -> Request:
        """Queue a request."""
        self.check_room(n, n * len(tokens))
        return await self.engine.open(tokens, params, options, n)


def give_up(requests: Iterable[Request]) -> None:
    """Abort what is not done."""
    for request in requests:
        if not request.is_done:
            request.abort()


def leave(requests: Iterable[Request]) -> None:
    """Nobody waits for these any more: they are given up if they are not done, and logged."""
    requests = list(requests)
    give_up(requests)
    if log.isEnabledFor(logging.INFO):
        for request in requests:
            if request.remark is not None:
                remark = request.remark()
                log.info("%s", remark.text, extra=remark.facts)


@asynccontextmanager
async def aborted_on_disconnect(receive: Receive, *requests: Request) -> AsyncIterator[None]:
    """Give requests up when the client leaves, or when the block is left before they are done."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        give_up(requests)

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        leave(requests)


async def until_left(events: AsyncIterator[T], *requests: Request) -> AsyncIterator[T]:
    """A stream of answers; requests are given up when it is left before they are done."""
    try:
        async for event in events:
            yield event
    finally:
        leave(requests)


async def in_thread(function: Callable[[], T]) -> T:
    """Run what may take long (templates, tokenizing) beside the event loop."""
    waiting: Awaitable[T] = asyncio.to_thread(function)
    return await waiting
