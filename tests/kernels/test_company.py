"""Threads that lose their cores leave the team and come back."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from edgellm.kernels.cpu.company import Company, idle_of, waits_of


class Machine:
    """Time as it passes, and a rival that takes ``rivals`` cores from the last of the threads.
    ``tells`` how long cores were idle."""

    def __init__(self, n_threads: int, tells: bool = True) -> None:
        self.now, self.rivals, self.n_threads = 0.0, 0, n_threads
        self.lost, self.idle = [0.0] * n_threads, 0.0
        self.company = Company(
            n_threads, lambda n: self.lost[:n], lambda: self.idle if tells else None,
            lambda: self.now,
        )  # fmt: skip

    def step(self, seconds: float = 0.01) -> int:
        size = self.company.begin()
        free = self.n_threads - self.rivals
        for i in range(free, size):
            self.lost[i] += seconds / 2
        self.idle += max(0, free - size) * seconds
        self.now += seconds
        self.company.end(seconds)
        return size


def test_a_quiet_machine_keeps_the_whole_team() -> None:
    machine = Machine(4)
    assert {machine.step() for _ in range(500)} == {4}


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("rivals", [1, 2, 3])
def test_as_many_leave_as_lose_their_cores(rivals: int, tells: bool) -> None:
    machine = Machine(4, tells)
    machine.rivals = rivals
    sizes = [machine.step() for _ in range(1000)]
    assert sizes[:2] == [4, 4]
    assert sizes.count(4 - rivals) > 800  # trials cost little
    assert set(sizes[500:]) <= {4 - rivals, 5 - rivals}


def test_nobody_is_tried_while_no_core_is_idle() -> None:
    machine = Machine(2)
    machine.rivals = 1
    sizes = [machine.step() for _ in range(1500)]  # 15 seconds: one trial without being told
    assert sizes.count(2) <= 6


def test_one_thread_stays_whatever_it_loses() -> None:
    machine = Machine(2)
    machine.rivals = 2
    assert min(machine.step() for _ in range(300)) == 1


@pytest.mark.parametrize("tells", [True, False])
def test_they_come_back_when_the_rival_has_gone(tells: bool) -> None:
    machine = Machine(2, tells)
    machine.rivals = 1
    for _ in range(1000):
        machine.step()
    machine.rivals = 0
    sizes = [machine.step() for _ in range(500)]
    assert set(sizes[210:]) == {2}


def test_long_steps_are_not_judged() -> None:
    machine = Machine(2)
    machine.lost[1] += 100.0
    machine.company.begin()
    machine.lost[1] += 100.0  # while a prompt was read
    machine.company.interrupt()
    assert {machine.step() for _ in range(10)} == {2}


def test_waits_are_told_of_threads_that_exist() -> None:
    read = waits_of([threading.get_native_id()])
    assert all(seconds >= 0 for seconds in read(1)) and len(read(1)) <= 1
    assert waits_of([2**22 + 1])(1) == []


def test_idle_time_is_that_of_the_cpus_asked_for(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  1 1 1 900 90 1\ncpu0 1 0 0 300 20 0\ncpu1 1 0 0 500 0 0\nintr 7\n")
    tick = os.sysconf("SC_CLK_TCK")
    assert idle_of([0], str(stat))() == 320 / tick
    assert idle_of([0, 1, 64], str(stat))() == 820 / tick
    assert idle_of([64], str(stat))() is None
    assert idle_of([0], str(tmp_path / "absent"))() is None
