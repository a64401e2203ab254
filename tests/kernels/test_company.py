"""Threads that lose their cores leave the team and come back."""

from __future__ import annotations

import threading

import pytest

from edgellm.kernels.cpu.company import Company, waits_of


class Machine:
    """Time as it passes, and a rival that takes ``rivals`` cores from the last of the threads."""

    def __init__(self, n_threads: int) -> None:
        self.now, self.rivals, self.n_threads = 0.0, 0, n_threads
        self.lost = [0.0] * n_threads
        self.company = Company(n_threads, lambda n: self.lost[:n], lambda: self.now)

    def step(self, seconds: float = 0.01) -> int:
        size = self.company.begin()
        free = self.n_threads - self.rivals
        for i in range(free, size):
            self.lost[i] += seconds / 2
        self.now += seconds
        self.company.end(seconds)
        return size


def test_a_quiet_machine_keeps_the_whole_team() -> None:
    machine = Machine(4)
    assert {machine.step() for _ in range(500)} == {4}


@pytest.mark.parametrize("rivals", [1, 2, 3])
def test_as_many_leave_as_lose_their_cores(rivals: int) -> None:
    machine = Machine(4)
    machine.rivals = rivals
    sizes = [machine.step() for _ in range(1000)]
    assert sizes[:2] == [4, 4]
    assert sizes.count(4 - rivals) > 800  # trials cost little
    assert set(sizes[500:]) <= {4 - rivals, 5 - rivals}


def test_one_thread_stays_whatever_it_loses() -> None:
    machine = Machine(2)
    machine.rivals = 2
    assert min(machine.step() for _ in range(300)) == 1


def test_they_come_back_when_the_rival_has_gone() -> None:
    machine = Machine(2)
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
