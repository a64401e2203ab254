"""The engine's thread: the same tokens as alone, for any readers, and whatever happens."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellm import LLM, AsyncLLM, RequestOptions, SamplingParams
from edgellm.errors import EdgeLLMError
from edgellm.loop import EngineError
from edgellm.request import Request
from edgellm.scheduler import RequestTimeout
from edgellm.sequence import Piece

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=10, temperature=1, seed=7, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=None, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[..., Path]) -> Iterator[LLM]:
    with LLM(tiny_model("llama"), n_ctx=512, n_threads=2, max_num_seqs=8) as model:
        yield model


@pytest.fixture
def engine(llm: LLM) -> Iterator[AsyncLLM]:
    with AsyncLLM(llm) as found:
        yield found
    assert llm.is_idle
    assert llm.runner.cache.faults() == []


@pytest.fixture
def slow(llm: LLM, engine: AsyncLLM) -> Iterator[None]:
    """Steps take a few milliseconds, so that requests are under way for a while."""
    remove = llm.on("output", lambda rows: time.sleep(0.002))
    yield
    remove()


def wait_until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    end = time.perf_counter() + seconds
    while not condition():
        assert time.perf_counter() < end, "it did not come true in time"
        time.sleep(0.001)


# ---- the same answers --------------------------------------------------------------------------


def test_the_same_tokens_as_the_model_alone(llm: LLM, engine: AsyncLLM) -> None:
    async def ask() -> tuple[Any, ...]:
        one = await engine.generate("abc", GREEDY)
        several = await engine.generate(["abc", "xyz"], SAMPLED)
        choices = await engine.generate([1, 2, 3], SAMPLED, n=3)
        pieces = [p async for p in engine.stream("abc", GREEDY)]
        return one, several, choices, pieces

    one, several, choices, pieces = asyncio.run(ask())
    assert one.tokens == llm.generate("abc", GREEDY).tokens and one.text
    assert [c.tokens for c in several] == [c.tokens for c in llm.generate(["abc", "xyz"], SAMPLED)]
    assert [c.tokens for c in choices] == [c.tokens for c in llm.generate([1, 2, 3], SAMPLED, n=3)]
    assert "".join(p.text for p in pieces) == one.text
    assert [p.token for p in pieces[:-1]] == one.tokens and pieces[-1].finish_reason == "length"
    assert engine.n_open == 0


def test_pieces_of_several_choices_tell_whose_they_are(llm: LLM, engine: AsyncLLM) -> None:
    async def ask() -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        async for piece in engine.stream("abcdef", SAMPLED, n=4):
            if piece.token is not None:
                found.setdefault(piece.choice, []).append(piece.token)
        return found

    expected = llm.generate("abcdef", SAMPLED, n=4)
    assert asyncio.run(ask()) == {i: c.tokens for i, c in enumerate(expected)}


def test_fifty_streams_at_once(llm: LLM, engine: AsyncLLM) -> None:
    prompts = [f"stream {i} " * (1 + i % 7) for i in range(50)]
    expected = [c.text for c in llm.generate(prompts, GREEDY)]

    async def read(prompt: str) -> str:
        return "".join([p.text async for p in engine.stream(prompt, GREEDY)])

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*map(read, prompts))

    assert asyncio.run(all_of_them()) == expected


def test_several_loops_and_threads_share_the_engine(llm: LLM, engine: AsyncLLM) -> None:
    prompts = [f"caller {i}" for i in range(9)]
    expected = [c.text for c in llm.generate(prompts, GREEDY)]
    found: dict[int, str] = {}

    async def stream(i: int) -> str:
        return "".join([p.text async for p in engine.stream(prompts[i], GREEDY)])

    def in_a_loop(i: int) -> None:
        found[i] = asyncio.run(stream(i))

    def piece_by_piece(i: int) -> None:
        found[i] = "".join(p.text for p in engine.submit(prompts[i], GREEDY))

    def at_the_end(i: int) -> None:
        request = engine.submit(prompts[i], GREEDY)
        assert request.wait()
        found[i] = request.completions()[0].text

    kinds = [in_a_loop, piece_by_piece, at_the_end]
    threads = [threading.Thread(target=kinds[i % 3], args=(i,)) for i in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(9)] == expected


def test_one_call_wakes_all_readers_of_a_loop(engine: AsyncLLM) -> None:
    """Also a burst of tokens costs a loop no more than a call for each step."""
    calls = 0

    async def read(i: int) -> None:
        async for _ in engine.stream([i + 1], GREEDY):
            pass

    async def all_of_them() -> None:
        nonlocal calls
        loop = asyncio.get_running_loop()
        call = loop.call_soon_threadsafe

        def counted(*arguments: Any, **more: Any) -> asyncio.Handle:
            nonlocal calls
            calls += 1
            return call(*arguments, **more)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
        await asyncio.gather(*(read(i) for i in range(8)))

    before = engine.metrics.steps
    asyncio.run(all_of_them())
    assert 0 < calls <= engine.metrics.steps - before + 1


def test_submitting_does_not_wait_for_a_step(llm: LLM, engine: AsyncLLM) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def hold(rows: object) -> None:
        inside.set()
        go_on.wait(10)

    remove = llm.on("output", hold)
    try:
        first = engine.submit("first", GREEDY)
        assert inside.wait(10)
        begun = time.perf_counter()
        second = engine.submit("second", GREEDY)
        assert time.perf_counter() - begun < 5  # the step lasts until go_on
        assert engine.step_seconds_now > 0 and engine.n_open == 2
    finally:
        go_on.set()
    assert first.wait() and second.wait()
    remove()
    assert engine.step_seconds_now == 0


def test_long_texts_and_grammars_are_prepared_beside_the_event_loop(
    llm: LLM, engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    where: list[str] = []
    prepare = llm.prepare

    def noted(*arguments: Any) -> Any:
        where.append(threading.current_thread().name)
        return prepare(*arguments)

    monkeypatch.setattr(llm, "prepare", noted)

    async def ask() -> None:
        await engine.generate("short", GREEDY)
        await engine.generate("a", SamplingParams(max_tokens=4, regex="[ab]{3}"))
        with pytest.raises(EdgeLLMError, match="context"):
            await engine.generate("long " * 1000, GREEDY)

    asyncio.run(ask())
    assert where[0] == threading.current_thread().name
    assert all(name.startswith("asyncio") for name in where[1:]) and len(where) == 3


# ---- giving up ---------------------------------------------------------------------------------


def test_a_loop_left_early_aborts(llm: LLM, engine: AsyncLLM) -> None:
    async def look() -> None:
        async for piece in engine.stream("hello", ENDLESS):
            if piece.token is not None:
                break
        begun = engine.metrics.steps
        while engine.n_open:
            await asyncio.sleep(0.0005)
        assert llm.is_idle and engine.metrics.steps - begun <= 2

    asyncio.run(look())


def test_a_stream_that_is_closed_aborts_even_if_somebody_keeps_it(engine: AsyncLLM) -> None:
    async def look() -> None:
        kept = engine.stream("hello", ENDLESS)
        with pytest.raises(ZeroDivisionError):
            async with kept as pieces:
                async for _ in pieces:
                    raise ZeroDivisionError
        while engine.n_open:
            await asyncio.sleep(0.0005)
        assert [p async for p in kept] == []

    asyncio.run(look())


@pytest.mark.parametrize("how", ["stream", "generate"])
def test_a_cancelled_task_aborts(llm: LLM, engine: AsyncLLM, how: str) -> None:
    async def read() -> None:
        if how == "generate":
            await engine.generate(["hello", "world"], ENDLESS)
        async for _ in engine.stream("hello", ENDLESS):
            pass

    async def cancel() -> None:
        task = asyncio.create_task(read())
        while not llm.runner.cache.n_rows_free < 8:
            await asyncio.sleep(0.0005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while engine.n_open:
            await asyncio.sleep(0.0005)
        assert llm.is_idle

    asyncio.run(cancel())


def test_aborting_in_the_queue_in_prefill_and_in_decode(
    llm: LLM, engine: AsyncLLM, slow: None
) -> None:
    running = [engine.submit([i + 1], ENDLESS) for i in range(8)]
    wait_until(lambda: all(r.choices[0].first_token for r in running))
    queued = engine.submit("in the queue", GREEDY)
    time.sleep(0.01)
    assert not queued.choices[0].started
    engine.abort(queued)
    assert queued.wait(timeout=5) and queued.completions()[0].finish_reason == "abort"
    assert not queued.choices[0].started and queued.choices[0].n_computed == 0

    engine.abort(running[0])
    assert running[0].wait(timeout=5)
    found = running[0].completions()[0]
    assert found.finish_reason == "abort" and found.tokens
    # 8 tokens of a prompt a step beside others, so that it is there for a while
    prefill = engine.submit([7] * 500, GREEDY)
    wait_until(lambda: prefill.choices[0].n_computed > 0)
    engine.abort(prefill)
    assert prefill.wait(timeout=5)
    assert prefill.completions()[0].tokens == [] and not prefill.choices[0].first_token
    for request in running[1:]:
        engine.abort(request)


def test_an_abort_after_the_end_changes_nothing(engine: AsyncLLM) -> None:
    request = engine.submit("abc", GREEDY)
    assert request.wait()
    engine.abort(request)
    assert request.completions()[0].finish_reason == "length"


def test_a_stream_that_is_never_read_ends_by_itself(llm: LLM, engine: AsyncLLM) -> None:
    request = engine.submit("abc", GREEDY)
    wait_until(lambda: engine.n_open == 0)
    assert sum(len(c.pieces) for c in request.choices) == 13
    asyncio.run(_opened_and_dropped(engine))
    wait_until(lambda: engine.n_open == 0)


async def _opened_and_dropped(engine: AsyncLLM) -> None:
    """The event loop ends with a request under way."""
    await engine.open("abc", GREEDY)


def test_readers_of_a_closed_loop_are_given_up(llm: LLM, engine: AsyncLLM) -> None:
    loop = asyncio.new_event_loop()
    stream = engine.stream("abc", ENDLESS)
    task = loop.create_task(stream.__anext__())  # type: ignore[arg-type]

    async def until_it_waits() -> None:
        while stream.request is None or stream.request.waiter is None:
            await asyncio.sleep(0)

    hold = threading.Event()
    remove = llm.on("output", lambda rows: hold.wait(10) and None)
    loop.run_until_complete(until_it_waits())
    loop.close()  # while the reader waits
    hold.set()
    wait_until(lambda: engine.n_open == 0)
    remove()
    assert stream.request is not None and stream.request.is_cancelled
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # it is what this is about


def test_a_stopped_loop_holds_nobody_up(engine: AsyncLLM) -> None:
    loop = asyncio.new_event_loop()

    async def read() -> int:
        return len([p async for p in engine.stream("abc", GREEDY)])

    task = loop.create_task(read())
    loop.call_later(0.005, loop.stop)
    loop.run_forever()
    assert engine.submit("others", GREEDY).wait(timeout=10)
    assert loop.run_until_complete(task) == 13  # it goes on where it was
    loop.close()


def test_timeouts_of_requests(engine: AsyncLLM, slow: None) -> None:
    running = [engine.submit([i + 1], ENDLESS) for i in range(7)]
    whole = engine.submit("slow", ENDLESS, RequestOptions(timeout=0.05))
    late = engine.submit("late", ENDLESS, RequestOptions(queue_timeout=0.02))
    for request, message in ((late, "begun within 0.02"), (whole, "done within 0.05")):
        assert request.wait(timeout=5)
        with pytest.raises(RequestTimeout, match=message):
            request.completions()
    for request in running:
        engine.abort(request)


# ---- failures ----------------------------------------------------------------------------------


def test_a_request_that_cannot_be_served_fails_alone(engine: AsyncLLM) -> None:
    async def ask() -> None:
        good = asyncio.create_task(engine.generate("good", GREEDY))
        for bad in ([999], "", None, [["a"]], 5):
            with pytest.raises(EdgeLLMError):
                await engine.generate(bad, GREEDY)
        for params in ({"max_tokens": 1}, 5):
            with pytest.raises(EdgeLLMError, match="params must be"):
                await engine.generate("a", params)  # type: ignore[arg-type]
        with pytest.raises(EdgeLLMError, match="n must be"):
            await engine.generate("a", GREEDY, n=0)
        assert len((await good).tokens) == 12

    asyncio.run(ask())
    assert engine.is_ready


def test_a_sampler_that_raises_ends_its_request_alone(llm: LLM, engine: AsyncLLM) -> None:
    def fail(*_: object) -> int:
        raise RuntimeError("a bad sampler")

    good = engine.submit("good", GREEDY)
    choices = llm.prepare("bad", GREEDY)
    choices[0].sampler.draw = fail  # type: ignore[method-assign]
    bad = Request(choices, engine._thread)
    engine._thread.submit(bad)
    assert good.wait() and bad.wait()
    assert len(good.completions()[0].tokens) == 12
    with pytest.raises(RuntimeError, match="a bad sampler"):
        bad.completions()


@pytest.mark.parametrize("error", [RuntimeError("a bad hook"), SystemExit(3), KeyboardInterrupt()])
def test_a_hook_that_raises_fails_the_step_and_the_engine_goes_on(
    llm: LLM, engine: AsyncLLM, error: BaseException
) -> None:
    def fail(rows: object) -> None:
        raise error

    remove = llm.on("blk.0.resid", fail)
    request = engine.submit("abc", GREEDY)
    assert request.wait(timeout=10)
    remove()
    with pytest.raises((RuntimeError, EngineError)):
        request.completions()
    again = engine.submit("abc", GREEDY)
    assert again.wait() and len(again.completions()[0].tokens) == 12
    assert engine.is_ready


def test_an_error_out_of_a_step_fails_what_runs_is_counted_and_no_more(
    llm: LLM, engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule, times = llm._loop.scheduler.schedule, 0

    def fail_once() -> Any:
        nonlocal times
        batch = schedule()
        times += 1
        if times == 3:
            raise RuntimeError("a fault in the scheduler")
        return batch

    monkeypatch.setattr(llm._loop.scheduler, "schedule", fail_once)
    before = engine.metrics.step_errors
    requests = [engine.submit([i + 1], GREEDY) for i in range(12)]
    assert all(r.wait(timeout=10) for r in requests)
    failed = [r for r in requests if r.choices[0].error]
    assert 1 <= len(failed) <= 8 and engine.metrics.step_errors == before + 1
    with pytest.raises(RuntimeError, match="a fault in the scheduler"):
        failed[0].completions()
    assert engine.is_ready


def test_a_step_that_always_fails_ends_all_requests(
    llm: LLM, engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("always")

    with monkeypatch.context() as patch:
        patch.setattr(llm._loop.scheduler, "schedule", fail)
        requests = [engine.submit([i + 1], GREEDY) for i in range(20)]
        assert all(r.wait(timeout=10) for r in requests)
    assert engine.submit("abc", GREEDY).wait(timeout=10)


def test_a_stall_is_seen_and_counted_once(llm: LLM) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def hold(rows: object) -> None:
        inside.set()
        go_on.wait(10)

    before = llm.metrics.stalls
    with AsyncLLM(llm, stall_seconds=0.05) as engine:
        assert not engine.is_stalled and engine.is_ready
        remove = llm.on("output", hold)
        request = engine.submit("abc", GREEDY)
        assert inside.wait(10)
        wait_until(lambda: engine.is_stalled)
        assert engine.step_seconds_now > 0.04 and not engine.is_ready and engine.is_alive
        assert engine.is_stalled and llm.metrics.stalls == before + 1
        go_on.set()
        assert request.wait()
        remove()
        wait_until(lambda: engine.is_ready)
        assert llm.metrics.stalls == before + 1


# ---- the end -----------------------------------------------------------------------------------


def test_closing_fails_what_runs_and_refuses_what_comes(llm: LLM) -> None:
    engine = AsyncLLM(llm)
    requests = [engine.submit([i + 1], ENDLESS) for i in range(12)]
    wait_until(lambda: requests[0].choices[0].first_token)
    engine.close()
    engine.close()
    for request in requests:
        assert request.is_done
        with pytest.raises(EngineError, match="closed before the request was done"):
            request.completions()
    with pytest.raises(EngineError, match="This engine is closed"):
        engine.submit("abc", GREEDY)
    assert not engine.is_alive and not engine.is_ready
    assert llm.is_idle and len(llm.generate("abc", GREEDY).tokens) == 12


def test_closing_can_wait_for_what_runs(llm: LLM) -> None:
    remove = llm.on("output", lambda rows: time.sleep(0.002))

    async def use() -> list[Piece]:
        engine = AsyncLLM(llm)
        stream = engine.stream("abc", GREEDY)
        first = await stream.__anext__()
        endless = await engine.open("abcd", ENDLESS, RequestOptions(timeout=0.2))
        await engine.aclose(drain=10)
        with pytest.raises(EngineError, match="closed"):
            await engine.generate("abc", GREEDY)
        with pytest.raises(RequestTimeout):
            endless.completions()
        return [first, *[p async for p in stream]]

    assert len(asyncio.run(use())) == 13
    remove()


def test_an_engine_of_a_file_closes_its_model(tiny_model: Callable[..., Path]) -> None:
    async def use() -> LLM:
        async with AsyncLLM(tiny_model("llama"), n_ctx=64, n_threads=1) as engine:
            assert len((await engine.generate("abc", GREEDY)).tokens) == 12
            return engine.llm

    assert not asyncio.run(use()).is_alive
    with pytest.raises(EdgeLLMError, match="takes no n_ctx"), AsyncLLM(LLM.__new__(LLM), n_ctx=1):
        pass


def test_a_model_closed_under_the_engine_ends_it(tiny_model: Callable[..., Path]) -> None:
    model = LLM(tiny_model("llama"), n_ctx=512, n_threads=2)
    engine = AsyncLLM(model)
    requests = [engine.submit([i + 1], ENDLESS) for i in range(12)]
    wait_until(lambda: requests[0].choices[0].first_token)
    model.close()
    for request in requests:
        assert request.wait(timeout=10)
        with pytest.raises(EngineError, match="closed"):
            request.completions()
    wait_until(lambda: not engine.is_alive)
    assert not engine.is_ready
    with pytest.raises(EngineError, match="closed"):
        engine.submit("abc", GREEDY)
    engine.close()


def test_a_dropped_engine_ends_its_threads(tiny_model: Callable[..., Path]) -> None:
    before = threading.active_count()
    engine = AsyncLLM(tiny_model("llama"), n_threads=2)
    assert engine.submit("abc", GREEDY).wait()
    assert threading.active_count() >= before + 3
    del engine
    gc.collect()
    wait_until(lambda: threading.active_count() <= before)


def _python(script: str, path: Path, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-W", "ignore", "-c", script, str(path)]
    return subprocess.run(run, capture_output=True, text=True, timeout=seconds)


def test_an_idle_engine_takes_no_time(tiny_model: Callable[..., Path]) -> None:
    """Less than 1 % of a core, in a process of its own."""
    script = (
        "import sys, time\n"
        "from edgellm import SamplingParams\n"
        "from edgellm.engine import AsyncLLM\n"
        "engine = AsyncLLM(sys.argv[1], n_threads=2)\n"
        "assert engine.submit('abc', SamplingParams(max_tokens=4)).wait()\n"
        "time.sleep(0.2)\n"
        "before = time.process_time()\n"
        "time.sleep(2)\n"
        "print(time.process_time() - before, sys.getswitchinterval())\n"
    )
    out = _python(script, tiny_model("llama"))
    used, interval = map(float, out.stdout.split())
    assert used < 0.02 and interval <= 0.0005


@pytest.mark.parametrize("end", ["pass", "sys.exit(3)", "raise ZeroDivisionError"])
def test_a_process_ends_with_requests_under_way(tiny_model: Callable[..., Path], end: str) -> None:
    script = (
        "import os, sys, time; from edgellm import AsyncLLM, SamplingParams\n"
        "engine = AsyncLLM(sys.argv[1], n_ctx=512, n_threads=2)\n"
        "endless = SamplingParams(max_tokens=None, ignore_eos=True)\n"
        "found = [engine.submit([i + 1] * 200, endless) for i in range(40)]\n"
        "time.sleep(0.05)\n"
        f"print('last line', flush=True)\n{end}"
    )
    begun = time.perf_counter()
    out = _python(script, tiny_model("llama"))
    assert out.stdout == "last line\n"
    assert out.returncode == {"sys.exit(3)": 3, "raise ZeroDivisionError": 1}.get(end, 0)
    assert "Fatal" not in out.stderr and time.perf_counter() - begun < 30


def test_use_after_fork_is_refused_in_one_sentence(tiny_model: Callable[..., Path]) -> None:
    script = (
        "import os, sys; from edgellm import AsyncLLM, SamplingParams\n"
        "engine = AsyncLLM(sys.argv[1], n_threads=2)\n"
        "params = SamplingParams(max_tokens=2, ignore_eos=True)\n"
        "engine.submit('a', params).wait()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try: engine.submit('a', params)\n"
        "    except ValueError as error: print(type(error).__name__, error, flush=True)\n"
        "    print('alive', engine.is_alive, flush=True)\n"
        "    engine.close()\n"
        "    sys.exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "request = engine.submit('b', params); request.wait()\n"
        "print(len(request.completions()[0].tokens))"
    )
    out = _python(script, tiny_model("llama"))
    assert "EngineError An engine cannot be used after a fork" in out.stdout, out.stderr
    assert "alive False" in out.stdout and out.stdout.strip().endswith("2"), out.stderr


# ---- thousands of them -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_requests", "n_cancelled"), [(300, 150), pytest.param(6700, 5000, marks=pytest.mark.slow)]
)
def test_random_cancellations_lose_nothing_leak_nothing_and_mix_nothing_up(
    llm: LLM, engine: AsyncLLM, n_requests: int, n_cancelled: int
) -> None:
    """Each prompt carries its own nonce; whatever a request got is the beginning of what its prompt
    gives alone, and what was not cancelled got all of it."""
    rng = random.Random(5)
    shared = "The beginning that many of the prompts have. " * 3
    expected: dict[str, list[int]] = {}
    prompts = []
    for i in range(n_requests):
        nonce = f"{rng.getrandbits(64):016x}"
        prompts.append(rng.choice(["", shared]) + nonce * rng.choice([1, 1, 1, 8]) + f" {i}")
    params = [SamplingParams(max_tokens=rng.choice([3, 12]), temperature=rng.choice([0.0, 1.0]),
                             seed=i, ignore_eos=True) for i in range(n_requests)]  # fmt: skip
    got: dict[int, list[int]] = {}
    ended: dict[int, str] = {}

    async def one(i: int, until: float | None, most: int) -> None:
        tokens = got.setdefault(i, [])
        options = RequestOptions(priority=rng.choice(["interactive", "batch"]))
        stream = engine.stream(prompts[i], params[i], options)
        try:
            async with asyncio.timeout(until), stream:
                async for piece in stream:
                    if piece.token is not None:
                        tokens.append(piece.token)
                    ended[i] = piece.finish_reason or ""
                    if len(tokens) == most:
                        return
        except TimeoutError:
            ended[i] = "cancelled"

    async def all_of_them() -> None:
        async with asyncio.TaskGroup() as group:
            for i in range(n_requests):
                wait, most = rng.choice([None, None, 0.0, 0.001, 0.01]), rng.choice([99, 99, 2, 5])
                group.create_task(one(i, wait, most))
                while engine.n_open > 40:
                    await asyncio.sleep(0.001)

    asyncio.run(all_of_them())
    wait_until(lambda: engine.n_open == 0)
    assert llm.is_idle and llm.runner.cache.faults() == [] and llm.metrics.faults == 0
    assert len(got) == n_requests
    # alone: nothing else runs, nothing is reused
    llm.runner.cache.start_anew(reuse=False)
    try:
        for i in range(n_requests):
            expected[prompts[i]] = llm.generate(prompts[i], params[i]).tokens
    finally:
        llm.runner.cache.start_anew(reuse=True)
    n_whole = 0
    for i in range(n_requests):
        whole = expected[prompts[i]]
        assert got[i] == whole[: len(got[i])], f"request {i} got somebody else's tokens"
        if ended.get(i) == "length":
            n_whole += 1
            assert got[i] == whole
    n_begun = sum(0 < len(got[i]) < len(expected[prompts[i]]) for i in range(n_requests))
    assert n_requests - n_whole >= n_cancelled and min(n_whole, n_begun) > n_requests / 50


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_an_engine_cannot_be_copied(engine: AsyncLLM) -> None:
    import pickle

    with pytest.raises(EngineError, match="copied or pickled"):
        pickle.dumps(engine)


def test_scoring_a_text_ends_no_request_that_waits(tiny_model: Callable[..., Path]) -> None:
    """A score holds a seat between its steps; others wait for it, and the accounts are right."""
    tokens, found = list(range(200)) * 2, []
    with LLM(tiny_model("llama"), n_ctx=512, n_threads=1, max_num_seqs=1) as llm:
        remove = llm.on("output", lambda rows: time.sleep(0.002))
        thread = threading.Thread(target=lambda: found.append(llm.score(tokens, 1)))
        thread.start()
        wait_until(lambda: not llm.is_idle)
        assert len(llm.generate([1, 2, 3], GREEDY).tokens) == 12
        thread.join()
        remove()
        assert len(found[0]) == 400 and llm.is_idle
        assert llm.metrics.faults == llm.metrics.stalls == 0


def test_a_score_that_loses_its_seat_goes_on_later(tiny_model: Callable[..., Path]) -> None:
    tokens, params = list(range(200)) * 2, SamplingParams(max_tokens=0, prompt_logprobs=1)
    with LLM(tiny_model("llama"), n_ctx=512, n_threads=1, max_num_seqs=1) as llm:
        [scored] = llm.submit(tokens, params, RequestOptions(priority="batch"))
        while len(scored.scores) < 100:
            llm.step()
        [other] = llm.submit([1, 2, 3], GREEDY)
        while not (scored.finish_reason and other.finish_reason):
            llm.step()
        assert scored.n_preempted == 1 and scored.scores == llm.score(tokens, 1)
        assert llm.is_idle and llm.runner.cache.faults() == [] and llm.metrics.faults == 0


# ---- readers that are behind, and progress ----------------------------------------------------


def test_a_request_rests_while_its_reader_is_behind(llm: LLM) -> None:
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    expected = llm.generate("abc", params).tokens
    with AsyncLLM(llm, stall_seconds=0.2) as engine:
        request = engine.submit("abc", params, RequestOptions(most_pieces=5))
        sequence = request.choices[0]
        wait_until(lambda: sequence.is_resting)
        stalls = llm.metrics.stalls
        time.sleep(0.5)
        assert len(sequence.tokens) == sequence.n_prompt + 5
        assert engine.is_ready and llm.metrics.stalls == stalls  # the engine is not to blame
        assert engine.submit("other", GREEDY).wait(timeout=10)
        assert [p.token for p in request if p.token is not None] == expected
        given_up = engine.submit("abc", params, RequestOptions(most_pieces=5))
        wait_until(lambda: given_up.choices[0].is_resting)
        engine.abort(given_up)
        assert given_up.wait(timeout=10)
    # who waits for the end takes no pieces before it
    assert llm.generate("abc", params, RequestOptions(most_pieces=5)).tokens == expected
    assert llm.is_idle


def test_progress_of_a_prompt(tiny_model: Callable[..., Path]) -> None:
    with LLM(tiny_model("llama"), n_ctx=512, max_num_batched_tokens=64) as llm:
        options = RequestOptions(report_progress=True)
        plain = llm.generate("x" * 200, GREEDY)
        told = [piece.progress for piece in llm.stream("y" * 200, GREEDY, options)]
        assert [p.n_read for p in told if p is not None] == [0, 64, 128, 192, 200]
        done = llm.generate("x" * 200, GREEDY, options)
        assert (done.text, done.tokens) == (plain.text, plain.tokens)


@pytest.mark.parametrize("most", [0, -1, True, 1.5, "5"])
def test_a_number_of_pieces_that_is_none(most: Any) -> None:
    with pytest.raises(EdgeLLMError, match="most_pieces"):
        RequestOptions(most_pieces=most)


def test_scores_are_the_log_softmax_of_the_logits(tiny_model: Callable[..., Path]) -> None:
    """Alone, in company, with a completion behind them, and with several: the same numbers."""
    prompts = [[i * 7 % 256 for i in range(n)] for n in (1, 2, 63, 64, 65, 150)]
    with LLM(tiny_model("llama"), n_ctx=512, n_threads=2, max_num_seqs=4) as llm:
        params = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=2)
        together = llm.generate(prompts, params)
        assert llm.generate(prompts, params, n=2)[4][1].prompt_logprobs is None
        for tokens, done in zip(prompts, together, strict=True):
            logits = llm.logits(tokens).astype(np.float64)
            right = logits - logits.max(-1, keepdims=True)
            right -= np.log(np.exp(right).sum(-1, keepdims=True))
            scores = done.prompt_logprobs
            assert scores == llm.score(tokens, 2) and scores[0] == (tokens[0], None, [])
            for i, (token, logprob, best) in enumerate(scores[1:]):
                assert token == tokens[i + 1]
                assert logprob == pytest.approx(right[i, token], abs=1e-5)
                assert [t for t, _ in best] == list(np.argsort(-right[i], kind="stable")[:2])
            alone = llm.generate(tokens, SamplingParams(max_tokens=3, temperature=0))
            assert alone.tokens == done.tokens
        assert (
            llm.score([1, 2, 3], 0)[1:] == [(t, p, []) for t, p, _ in llm.score([1, 2, 3], 2)][1:]
        )
        assert llm.is_idle and llm.metrics.faults == 0
