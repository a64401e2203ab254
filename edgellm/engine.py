"""A model for asyncio programs and servers: an engine's thread computes, event loops only wait.

    async with AsyncLLM("model.gguf", max_num_seqs=8) as engine:
        async for piece in engine.stream("Once upon a time", SamplingParams(max_tokens=64)):
            print(piece.text, end="")

Any number of requests, event loops and threads share the one thread, and each request gets what it
would get alone.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
import weakref
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from edgellm.engine_thread import EngineThread
from edgellm.errors import EdgeLLMError
from edgellm.llm import LLM
from edgellm.loop import EngineError
from edgellm.metrics import Metrics
from edgellm.prompts import Prompt, is_tokens
from edgellm.request import Request, Stream
from edgellm.request_options import RequestOptions
from edgellm.sampling_params import SamplingParams
from edgellm.sequence import Sequence
from edgellm.turns import Turns

_SHORT = 2000  # characters (or ids): what is not longer is tokenized where it is asked for
# Seconds. A step is many short calls of Python; beside a busy thread each would wait for 5 ms.
_SWITCH_INTERVAL = 0.0005


class AsyncLLM:
    """``model`` is a loaded LLM, which stays the caller's to close and whose own methods take turns
    with the engine, or the path of a file, with the arguments of LLM. Loading takes seconds and
    blocks: do it before the event loop runs.

    ``stall_seconds`` without progress, although there is work, count as a stall. The process's
    ``sys.setswitchinterval`` becomes at most 0.5 ms, and stays so. Engines with the same ``turns``
    compute a step each in turn.
    """

    def __init__(
        self, model: LLM | str | os.PathLike[str], *, stall_seconds: float = 30.0,
        turns: Turns | None = None, **arguments: Any,
    ) -> None:  # fmt: skip
        self._is_ours = not isinstance(model, LLM)
        if isinstance(model, LLM):
            if arguments:
                raise EdgeLLMError(f"A loaded model takes no {next(iter(arguments))}.")
            self.llm = model
        else:
            self.llm = LLM(model, **arguments)
        self.llm.tokenizer  # noqa: B018  it may still be loading; no event loop should wait for it
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL))
        self._thread = EngineThread(self.llm, stall_seconds, turns)
        # also at exit, and then before the model's own threads are stopped
        self._finalizer = weakref.finalize(self, EngineThread.stop_at_exit, self._thread)
        self._thread.start()

    # ---- requests -------------------------------------------------------------------------------

    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None,
        options: RequestOptions | None = None, n: int = 1,
    ) -> Request:  # fmt: skip
        """Queue a request of n choices, from any thread. The prompt is tokenized and a grammar
        compiled here and now, which a long text makes slow: in an event loop, ``await open``.

        EdgeLLMError for what cannot be served, EngineError when the engine is closed.
        """
        return self._submit(prompt, params, options, n, time.perf_counter())

    async def open(
        self, prompt: Prompt, params: SamplingParams | None = None,
        options: RequestOptions | None = None, n: int = 1,
    ) -> Request:  # fmt: skip
        """As ``submit``; what may take long is done in the event loop's pool of threads."""
        arrived = time.perf_counter()
        params = params or SamplingParams()
        self._thread.check()
        if not _takes_long(prompt, params):
            return self._submit(prompt, params, options, n, arrived)
        # a request that is cancelled meanwhile was never queued
        choices = await asyncio.to_thread(self.llm.prepare, prompt, params, options, n)
        return self._queue(Request(choices, self._thread), arrived)

    def _submit(
        self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions | None,
        n: int, arrived: float,
    ) -> Request:  # fmt: skip
        self._thread.check()
        choices = self.llm.prepare(prompt, params or SamplingParams(), options, n)
        return self._queue(Request(choices, self._thread), arrived)

    def _queue(self, request: Request, arrived: float) -> Request:
        for choice in request.choices:
            choice.arrived = arrived  # tokenizing is a part of the wait
        self._thread.submit(request)
        return request

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None,
        options: RequestOptions | None = None, n: int = 1,
    ) -> Stream:  # fmt: skip
        """Pieces of n choices as they come, for ``async for``; ``piece.choice`` tells them apart.
        The request begins with the first piece that is waited for.

        An error of a choice is raised when all of them are finished.
        """
        return Stream(lambda: self.open(prompt, params, options, n))

    async def generate(
        self, prompts: Any, params: SamplingParams | None = None,
        options: RequestOptions | None = None, *, n: int | None = None,
    ) -> Any:  # fmt: skip
        """The completion of a prompt, or a list of completions of a list; with ``n`` a list of n of
        them for each prompt. As LLM.generate, also in its lanes. Cancelling this aborts them."""
        if not isinstance(prompts, str | list | tuple) and not is_tokens(prompts):
            raise EdgeLLMError("A prompt is a text, a list of token ids, or a list of those.")
        one = isinstance(prompts, str) or (len(prompts) > 0 and is_tokens(prompts))
        options = options or RequestOptions(priority="interactive" if one else "batch")
        options = replace(options, most_pieces=None)  # none is taken before the end
        requests: list[Request] = []
        try:
            for prompt in [prompts] if one else prompts:
                requests.append(await self.open(prompt, params, options, 1 if n is None else n))
            for request in requests:
                await request.until(end=True)
            answers: list[Any] = [request.completions() for request in requests]
        except BaseException:
            for request in requests:
                self.abort(request)
            raise
        if n is None:
            answers = [choices[0] for choices in answers]
        return answers[0] if one else answers

    def abort(self, request: Request) -> None:
        """Give a request up, from any thread; what it holds is free after the running step."""
        request.abort()
        self._thread.wake()

    def lose(self, reason: str) -> None:
        """Fail what is open with EngineError, from any thread, although the engine is stuck; it
        takes requests again when it goes on."""
        self._thread.lose(EngineError(reason))

    # ---- state ----------------------------------------------------------------------------------

    @property
    def metrics(self) -> Metrics:
        return self.llm.metrics

    @property
    def n_open(self) -> int:
        """Requests that wait or run."""
        return self._thread.n_open

    @property
    def running(self) -> list[Sequence]:
        """Choices that are being computed, at this moment."""
        return list(self.llm.scheduler.running)

    @property
    def n_waiting(self) -> int:
        """Choices that have not been begun, or wait to go on."""
        return self.llm.scheduler.n_waiting

    @property
    def n_queued_tokens(self) -> int:
        """Tokens of all that wait."""
        return self.llm.scheduler.n_waiting_tokens

    @property
    def kv_usage(self) -> float:
        """Share of the cache's blocks that requests hold, of the fullest group of layers."""
        groups = self.llm.runner.cache.groups
        return max((g.pool.n_held / g.n_blocks for g in groups), default=0.0)

    @property
    def is_alive(self) -> bool:
        """Whether the thread works (or waits for work) and the model can compute."""
        return self._thread.is_alive

    @property
    def is_stalled(self) -> bool:
        """Whether there is work and no step has made progress for ``stall_seconds``."""
        return self._thread.is_stalled

    @property
    def is_ready(self) -> bool:
        """Whether a request would be served now."""
        return self.is_alive and not self._thread.is_closing and not self.is_stalled

    @property
    def step_seconds_now(self) -> float:
        """How long the running step has taken so far; 0 between steps."""
        return self._thread.step_seconds_now

    # ---- the end --------------------------------------------------------------------------------

    def close(self, drain: float = 0.0) -> None:
        """Take no more requests, wait at most ``drain`` seconds for those that are open, and fail
        the rest with EngineError. Blocks, at least for the running step: in an event loop,
        ``await aclose``."""
        if drain < 0:
            raise EdgeLLMError(f"drain must be seconds of at least 0, not {drain!r}.")
        self._thread.stop(drain)
        self._finalizer.detach()
        if self._is_ours:
            self.llm.close()

    async def aclose(self, drain: float = 0.0) -> None:
        """``close`` without blocking the event loop."""
        await asyncio.to_thread(self.close, drain)

    def __reduce__(self) -> str:
        raise EngineError("An engine cannot be copied or pickled; make one where it is needed.")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        await self.aclose()


def _takes_long(prompt: Any, params: Any) -> bool:
    """Whether other readers of an event loop would notice that a request is prepared in it."""
    if isinstance(params, SamplingParams) and params.structured:
        return True
    return isinstance(prompt, str | list | tuple) and len(prompt) > _SHORT
