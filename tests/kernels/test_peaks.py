"""The loops that measure the machine do what they are timed for."""

from __future__ import annotations

import ctypes

import numpy as np

from edgellm.kernels.cpu import peaks, targets
from edgellm.kernels.cpu.peaks import Peaks
from edgellm.kernels.cpu.store import KernelStore
from edgellm.kernels.cpu.team import Team

KERNEL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)


def run(name: str, emit, args: list[int], lo: int, hi: int) -> None:  # type: ignore[no-untyped-def]
    store, block = KernelStore(), np.array(args, np.int64)
    KERNEL(store.get(name, emit))(block.ctypes.data, lo, hi, 1)


def test_the_read_loop_reads_every_byte() -> None:
    lanes = targets.current().lanes
    data = np.random.default_rng(0).integers(0, 256, 3 << 16, dtype=np.uint8)
    out = np.zeros(192, np.uint8)
    run("peak_read", peaks.make_read(), [data.ctypes.data, out.ctypes.data], 1, 3)
    expected = np.bitwise_xor.reduce(data[1 << 16 :].reshape(-1, 4 * lanes), axis=0)
    assert np.array_equal(out[64 : 64 + 4 * lanes], expected)


def test_the_dot_loop_multiplies_every_turn() -> None:
    target = targets.current()
    out = np.zeros(48, np.int32)
    run("peak_dot", peaks.make_dot(), [100, out.ctypes.data], 0, 2)
    products = 4 * peaks._n_sums(target) * peaks._A_TURN * 200
    assert list(out[16 : 16 + target.lanes]) == [3 * 5 * products] * target.lanes


def test_a_team_is_measured() -> None:
    store = KernelStore()
    team = Team(2, store)
    measured = Peaks(team, store, n_bytes=1 << 20)
    assert measured.read() > 1e6 and measured.dot() > 1e6
    assert len(measured.buffer) % (2 << 16) == 0
    team.close()
