"""How fast this machine reads, multiplies and copies: what plans reckon with."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from edgellm.kernels.cpu.cores import default_threads
from edgellm.kernels.cpu.peaks import Peaks
from edgellm.kernels.cpu.store import KernelStore
from edgellm.kernels.cpu.team import Team
from edgellm.offload import CPU

if TYPE_CHECKING:
    from edgellm.kernels.cuda.device import Device

_SAMPLES = 7


@dataclass(frozen=True)
class Speed:
    """Of a place: ``read`` bytes/s of its memory, ``dots`` multiply-adds of bytes/s; of a device
    also ``copy`` bytes/s from the host, and ``hop`` seconds that handing over costs at any size."""

    read: float
    dots: float
    copy: float = float("inf")
    hop: float = 0.0


@dataclass(frozen=True)
class Speeds:
    """By place."""

    of: Mapping[str, Speed]

    def __getitem__(self, place: str) -> Speed:
        return self.of[place]

    def as_dict(self) -> dict[str, Any]:
        return {place: asdict(speed) for place, speed in self.of.items()}


def measure(devices: Mapping[str, Device], n_threads: int | None = None) -> Speeds:
    """About two seconds."""
    found = {CPU: measure_cpu(n_threads or default_threads())}
    found |= {name: measure_device(device) for name, device in devices.items()}
    return Speeds(found)


def measure_cpu(n_threads: int, store: KernelStore | None = None) -> Speed:
    """The best of a few samples with a team of n_threads."""
    store = store or KernelStore()
    team = Team(n_threads, store)
    try:
        peaks = Peaks(team, store)
        return Speed(
            max(peaks.read() for _ in range(_SAMPLES)), max(peaks.dot() for _ in range(_SAMPLES))
        )
    finally:
        team.close()


def measure_device(device: Device) -> Speed:
    """By copies within the device and to it, and by the matrix kernel of prompts. Sizes are small
    where kernels are emulated, and what memory is free allows."""
    is_real = device.kind == "cuda"
    n = min(256 << 20 if is_real else 1 << 20, device.memory()[0] // 8)
    side = 4096 if is_real else 256
    source, target = device.alloc(n), device.alloc(n)
    pinned = device.pinned(n)
    pinned[:] = 0
    try:
        within = _best(device, lambda: device.copy(target, source, n, device.main))
        into = _best(device, lambda: device.copy_to(target, pinned, device.main))
        word = pinned[:4]
        hop = _best(device, lambda: device.copy_to(target.at(0, 4), word, device.main))
        dots = _matrix_rate(device, side)
    finally:
        for buffer in (source, target):
            device.free(buffer)
    return Speed(2 * n / within, dots, n / into, hop)


def _matrix_rate(device: Device, side: int) -> float:
    """Multiply-adds/s of a prompt of ``side`` / 8 tokens times a square q8_0 matrix of zeros."""
    from edgellm.kernels.cuda import operations, pack, quantized
    from edgellm.kernels.cuda.operations import Matrix, Rows
    from edgellm.quant import by_name

    kind, n = by_name("q8_0"), side // 8
    sizes = [pack.packed_bytes(kind, side, side), 4 * n * side, n * quantized.row_bytes(side)]
    if sum(sizes) + 4 * n * side > device.memory()[0]:
        return 0.0
    data, x, taken, out, count = (
        device.alloc(size) for size in (*sizes, 4 * n * side, 256)
    )  # fmt: skip
    try:
        for buffer in (data, x):
            device.copy_to(buffer, np.zeros(buffer.n_bytes, np.uint8))
        device.copy_to(count, np.array([n], np.int32))
        rows, matrix = Rows(n, count), Matrix(kind, side, side, data)
        operations.quantize(device, x, taken, rows, side)
        seconds = _best(
            device, lambda: operations.linear(device, matrix, taken, out, rows, "prefill")
        )
        return n * side * side / seconds
    finally:
        device.synchronize()
        for buffer in (data, x, taken, out, count):
            device.free(buffer)


def _best(device: Device, work: Callable[[], None]) -> float:
    """Seconds of the quickest of a few."""
    work()
    device.synchronize()
    times = []
    for _ in range(_SAMPLES):
        started = time.perf_counter()
        work()
        device.synchronize()
        times.append(time.perf_counter() - started)
    return max(min(times), 1e-9)
