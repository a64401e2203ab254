"""The walk: every chunk once, barriers where they are asked for, any number of threads."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.kernels.cpu.stages import Stages
from edgellm.kernels.cpu.store import KernelStore
from edgellm.kernels.cpu.team import STAGE_WORDS, Team, TeamError
from edgellm.kernels.cpu.vector import I64, Emitter, Value

STORE = KernelStore()


def add_neighbours(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
    """out[i] = x[i] + x[n - 1 - i]; arguments x, out, address of n"""
    x, out, count = e.arguments(args, 3)
    n = e.load(I64, count)
    with e.loop(hi, lo) as i:
        e.store(e.load(I64, x + i * 8) + e.load(I64, x + (n - 1 - i) * 8), out + i * 8)


@pytest.fixture(scope="module", params=[1, 2, 5])
def team(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    made = Team(request.param, STORE)
    yield made
    made.close()


@settings(max_examples=40, deadline=None)
@given(n=st.integers(0, 300), chunk=st.integers(1, 40), depth=st.integers(1, 12),
       rows=st.booleans())  # fmt: skip
def test_stages_see_what_earlier_stages_wrote(
    team: Team, n: int, chunk: int, depth: int, rows: bool
) -> None:
    address = STORE.get("test_add_neighbours", add_neighbours)
    stages, count = Stages(), np.array([n], np.int64)
    buffers = [stages.buffer(1, 8 * max(n, 1)) for _ in range(depth + 1)]
    for i, (x, out) in enumerate(zip(buffers, buffers[1:], strict=False)):
        # rows of one stage need only their own; mix in parallel stages so that chains are broken
        args = [x, out, count.ctypes.data]
        stages.parallel(f"{i}", address, args, count.ctypes.data, chunk, [x], [out])
        if rows and n <= 1:
            stages.rows(f"{i}", address, args, count.ctypes.data, [x], [out])
    arena = stages.plan(share_memory=False)
    records, counters = stages.records(team.n_threads)
    start = (buffers[0].address - arena.ctypes.data) // 8
    values = np.arange(n) ** 2 % 1000
    arena.view(np.int64)[start : start + n] = values
    for size in (1, team.n_threads, 1 + n % team.n_threads):  # threads come and go between steps
        counters[:] = 0
        team._walk(records, None, size)
    for _ in range(depth):
        values = values + values[::-1]
    end = (buffers[-1].address - arena.ctypes.data) // 8
    assert np.array_equal(arena.view(np.int64)[end : end + n], values)


def test_buffers_share_memory_only_when_a_barrier_is_between() -> None:
    stages, count = Stages(), np.array([4], np.int64)
    a, b, c, d = (stages.buffer(1, 64) for _ in range(4))
    for x, out in ((a, b), (b, c), (c, d)):
        stages.parallel("", 0, [x, out], count.ctypes.data, 1, [x], [out])
    stages.plan()
    assert [s.barrier for s in stages.stages] == [True, True, True]
    assert a.address != b.address != c.address != d.address
    assert c.address == a.address and d.address == b.address


def test_a_closed_team_says_so() -> None:
    team = Team(2, STORE)
    team.close()
    with pytest.raises(TeamError, match="closed"):
        team.run(np.zeros((0, 8), np.int64))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs threads bound to CPUs")
def test_threads_stay_on_the_cpus_they_are_given() -> None:
    before = os.sched_getaffinity(0)
    first = min(before)
    team = Team(2, STORE, cpus=(first,))
    team.run(np.zeros((0, STAGE_WORDS), np.int64))  # all threads are there
    others = [int(t) for t in os.listdir("/proc/self/task") if int(t) != threading.get_native_id()]
    assert sum(os.sched_getaffinity(t) == {first} for t in others) >= 2
    assert os.sched_getaffinity(0) == before
    team.close()


def test_a_system_without_room_for_all_threads_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def start(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        real(thread)

    real = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(TeamError, match="only 2 of 4 threads could be started"):
        Team(4, STORE)
    assert not any(thread.is_alive() for thread in started)
