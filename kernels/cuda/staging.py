"""Weights that have no place of their own on a device: they wait, packed, in pinned memory of the
host, and are copied into one of a few slots each time a step comes to them.

A *unit* is what a section of the program needs at once. Units take turns in the slots in the order
in which every step reads them; a stream of its own copies ahead while the sections before compute.
Two events guard a slot: a section starts when its unit is there, and a slot is written to when the
section that read it last is done.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.cuda.device import Buffer, Device
from edgellm.kernels.cuda.weights import matrices_of, matrix_bytes
from edgellm.kernels.graph import Weight
from edgellm.kernels.split import N_SLOTS, Part, staging_bytes

Unit = list[Weight]


def units_of(sections: Sequence[Part], streamed: Collection[str]) -> dict[Part, Unit]:
    """What is copied for each section, in a step's order. A matrix that several sections read is
    not: it stays."""
    readers: dict[str, int] = {}
    for section in sections:
        for name in matrices_of(section.ops):
            readers[name] = readers.get(name, 0) + 1
    found = {
        section: [
            weight
            for name, weight in matrices_of(section.ops).items()
            if name in streamed and readers[name] == 1
        ]
        for section in sections
    }
    return {section: unit for section, unit in found.items() if unit}


def unit_bytes(unit: Unit) -> int:
    return sum(map(matrix_bytes, unit))


def _laid_out(unit: Unit) -> Iterator[tuple[Weight, int, int]]:
    """Each matrix with its first byte and how many it has."""
    at = 0
    for weight in unit:
        yield weight, at, (n := matrix_bytes(weight))
        at += n


@dataclass
class _Slot:
    memory: Buffer
    unit: int | None = None  # that is there or on its way
    there: Any = None  # events: the unit has arrived,
    read: Any = None  # and nobody reads it any more


class Staging:
    """Units in pinned memory and in the slots; ``at`` says where a matrix is when it is there, and
    ``host`` where it waits."""

    def __init__(self, device: Device, units: dict[Part, Unit]) -> None:
        """Takes the device's memory (OutOfDeviceMemory). Then ``pin`` takes the host's, and whoever
        fills ``host`` calls ``start``."""
        self._device = device
        self._order = {section: i for i, section in enumerate(units)}
        self.at, self.host = dict[str, Buffer](), dict[str, NDArray[np.uint8]]()
        self.memory: Buffer | None = None
        self._wanted, self._units = list(units.values()), list[NDArray[np.uint8]]()
        if not units:
            return
        sizes = [unit_bytes(unit) for unit in units.values()]
        self.memory, self._stream = device.alloc(staging_bytes(sizes)), device.stream()
        n_slots, size = min(N_SLOTS, len(sizes)), max(sizes)
        self._slots = [_Slot(self.memory.at(i * size, size)) for i in range(n_slots)]
        for i, unit in enumerate(self._wanted):
            slot = self._slots[i % n_slots].memory
            self.at |= {weight.name: slot.at(at, n) for weight, at, n in _laid_out(unit)}

    def pin(self) -> None:
        """OutOfHostMemory. It takes long, so it comes when all else has found room."""
        for unit in self._wanted:
            self._units.append(memory := self._device.pinned(unit_bytes(unit)))
            self.host |= {weight.name: memory[at : at + n] for weight, at, n in _laid_out(unit)}

    def close(self) -> None:
        """Give the host's memory back; nothing is under way."""
        self._units.clear()
        self.host.clear()

    def start(self) -> None:
        """Copy what the first sections need."""
        for i in range(min(N_SLOTS, len(self._order))):
            self._fetch(i)

    def enter(self, section: Part, stream: Any) -> None:
        """What follows on the stream finds the section's matrices in their places."""
        i = self._order.get(section)
        if i is not None:
            self._fetch(i)  # on its way already, unless a step was interrupted
            stream.wait(self._slots[i % len(self._slots)].there)

    def leave(self, section: Part, stream: Any) -> None:
        """The section is launched: what is next in its slot may come when it is done."""
        i = self._order.get(section)
        if i is not None:
            n = len(self._slots)
            self._slots[i % n].read = stream.record()
            self._fetch(i + n if i + n < len(self._units) else i % n)

    def _fetch(self, i: int) -> None:
        slot = self._slots[i % len(self._slots)]
        if slot.unit == i:
            return
        if slot.read is not None:
            self._stream.wait(slot.read)
        slot.unit = None  # a step that is interrupted here must not take it for what was there
        self._device.copy_to(slot.memory, self._units[i], self._stream)
        slot.unit, slot.there = i, self._stream.record()
