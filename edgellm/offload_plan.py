"""Layers onto devices, within their budgets: the search behind ``plan``.

Layers go to devices from the last to the first, as in llama.cpp: ``n_gpu_layers`` N are the last N
layers, and the output matrix is one more. What is left of a device's memory after whole layers
takes single matrices of the layers below, largest first: an op runs where its matrix lies. In a
mixture of experts, experts are the last to go, because a token reads few of them.

With ``stream`` "on", the first of the layers that were asked for and do not fit keep their matrices
in the host's memory, from which each step copies them through two slots on the first device; there
the layers compute, and keep their keys and values.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from edgellm.offload import (
    CPU,
    Layer,
    Matrix,
    OffloadError,
    Options,
    Plan,
    Room,
    Sizes,
    Taken,
    cpu_only,
)

LEAST_MATRIX = 1 << 20  # bytes: below, sending rows to and fro costs more than the CPU takes


def plan(sizes: Sizes, rooms: Sequence[Room], options: Options | None = None) -> Plan:
    """Where everything goes, within the rooms' budgets; what was asked for and does not fit is cut
    and noted. OffloadError for options that name what is not there."""
    options = options or Options()
    _check(sizes, rooms, options)
    n_layers, asked = len(sizes.layers), options.n_gpu_layers
    if not rooms or asked == 0:
        return cpu_only(n_layers, "No layer is offloaded, as asked (--ngl 0)." if rooms else "")
    most = n_layers + 1 if asked is None else min(asked, n_layers + 1)
    made, n = _Placing(sizes, rooms, options).most_layers(most)
    if asked is not None and n < most:
        made.notes.insert(
            0, f"{most} layers do not fit into the GPU's memory (--ngl): {n} do, the rest of the "
            "model runs on the CPU.",
        )  # fmt: skip
    for why, names in _held(sizes).items():
        stay = "stays" if len(names) == 1 else "stay"
        made.notes.append(f"{_ranges(names)} {stay} on the CPU: {why}.")
    return made


def _held(sizes: Sizes) -> dict[str, list[int]]:
    """Layers that cannot leave the CPU, by reason."""
    found: dict[str, list[int]] = {}
    for i, layer in enumerate(sizes.layers):
        if layer.why:
            found.setdefault(layer.why, []).append(i)
    return found


def _ranges(numbers: list[int]) -> str:
    """Layers 0-2, 4."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    said = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"Layer {said}" if len(numbers) == 1 else f"Layers {said}"


def _check(sizes: Sizes, rooms: Sequence[Room], options: Options) -> None:
    split, names = options.tensor_split, {room.name for room in rooms}
    if len(split) > len(rooms):
        raise OffloadError(
            f"--tensor-split has {len(split)} shares, and there are {len(rooms)} GPUs."
        )
    matrices = [m.name for x in (*sizes.layers, sizes.output) for m in x.matrices]
    for pattern, place in options.overrides:
        if place != CPU and place not in names:
            there = ", ".join([CPU, *sorted(names)])
            raise OffloadError(f"-ot {pattern}={place}: there is no {place}; there is {there}.")
        try:
            found = re.compile(pattern)
        except re.error as error:
            raise OffloadError(f"-ot {pattern}: no regular expression ({error}).") from None
        if not any(found.search(name) for name in matrices):
            raise OffloadError(f"-ot {pattern}={place}: no matrix of the model is called so.")


class _Placing:
    """Tries placements against the rooms' budgets."""

    def __init__(self, sizes: Sizes, rooms: Sequence[Room], options: Options) -> None:
        self.sizes, self.rooms, self.options = sizes, rooms, options
        self.n_layers = len(sizes.layers)
        self.budgets = {room.name: room.budget(options.fit_margin) for room in rooms}
        self.has_experts = any(layer.experts for layer in sizes.layers)
        self.pinned = {
            m.name: place
            for x in (*sizes.layers, sizes.output)
            for m in x.matrices
            for pattern, place in reversed(options.overrides)  # the first that matches wins
            if re.search(pattern, m.name)
        }

    def most_layers(self, most: int) -> tuple[Plan, int]:
        """The best placement of up to ``most`` layers, and of how many it is."""
        n_moe = min(self.options.n_cpu_moe, self.n_layers)
        made = self._placed(most, n_moe)
        if made is None and self.has_experts:
            fitting = (self._place(most, n) for n in range(n_moe + 1, self.n_layers + 1))
            made = next((p for p in fitting if p is not None), None)
            n_moe = n_moe if made is not None else self.n_layers
        n = most
        while made is None:
            n -= 1
            if n < 0:
                there = ", ".join(f"{p}={at}" for p, at in self.options.overrides if at != CPU)
                raise OffloadError(
                    f"-ot {there}: that does not fit into the GPU's memory; send fewer matrices "
                    "there, or lower --fit-margin."
                )
            made = self._placed(n, n_moe)
        if self.options.n_gpu_layers is None:
            made = self._fullest(made, n, n_moe)
        self._keep(made)
        self._note(made)
        return made, n

    def _fullest(self, made: Plan, n: int, n_moe: int) -> Plan:
        """Nothing was asked for: of n layers, or the output matrix and fewer layers, each with
        single matrices beside it, what leaves less of the memory unused."""
        self._fill(made, self.options.n_cpu_moe)
        if n > self.n_layers:
            return made
        with_output = (self._place(k, n_moe, has_output=True) for k in range(n, -1, -1))
        other = next((p for p in with_output if p is not None), None)
        if other is None:
            return made
        self._fill(other, self.options.n_cpu_moe)
        return max(made, other, key=lambda p: sum(t.total for t in p.taken.values()))

    def _placed(self, n: int, n_moe: int) -> Plan | None:
        """The last n layers on the devices, if need be with as few of them streamed as possible."""
        made = self._place(n, n_moe)
        if made is not None or self.options.stream != "on":
            return made
        if self._place(n, n_moe, n_streamed=n) is None:
            return None
        tries = (self._place(n, n_moe, n_streamed=k) for k in range(1, n + 1))
        return next(p for p in tries if p is not None)

    def _place(
        self, n: int, n_moe: int, has_output: bool = False, n_streamed: int = 0
    ) -> Plan | None:
        """The last n layers on the devices, the output matrix too if it is wanted or there are more
        than the layers, without the experts of the first n_moe layers; the first n_streamed of them
        streamed. None: that does not fit."""
        places = [CPU] * (self.n_layers + 1)
        first = max(0, self.n_layers - n)
        end = self.n_layers + (has_output or n > self.n_layers)
        chosen = [i for i in range(first, end) if not self._layer(i).why]
        options = self.options
        made = Plan(places, kv_offload=options.kv_offload, strict=options.strict)
        made.taken = {room.name: Taken() for room in self.rooms}
        by_split = self._by_split(chosen) if self.options.tensor_split else {}
        last = len(self.rooms) - 1
        streamed = {i for i in chosen[:n_streamed] if i < self.n_layers}
        for i in reversed(chosen):
            last = 0 if i in streamed else last
            layer = self._layer(i)
            off = {m.name: CPU for m in layer.matrices if m.is_expert and i < n_moe} | {
                m.name: self.pinned[m.name] for m in layer.matrices if m.name in self.pinned
            }
            while True:
                name = self.rooms[by_split.get(i, last)].name
                if self._put(made, i, layer, name, off, i in streamed):
                    break
                if i in by_split or last == 0:
                    return None
                last -= 1
        for i, layer in enumerate((*self.sizes.layers, self.sizes.output)):
            if places[i] == CPU and not layer.why and not self._pin_alone(made, layer):
                return None
        return made

    def _layer(self, i: int) -> Layer:
        return self.sizes.output if i == self.n_layers else self.sizes.layers[i]

    def _by_split(self, chosen: list[int]) -> dict[int, int]:
        """Layer -> number of the device, in the shares of --tensor-split."""
        shares, done, found = self.options.tensor_split, 0.0, {}
        bounds = [(done := done + share) / sum(shares) for share in shares]
        bounds[-1] = 1.0
        for k, i in enumerate(chosen):
            found[i] = next(d for d, bound in enumerate(bounds) if k / len(chosen) < bound)
        return found

    def _put(
        self, made: Plan, i: int, layer: Layer, name: str, off: dict[str, str], is_streamed: bool
    ) -> bool:
        wanted, streamed = _copied(made.taken), set[str]()
        wanted[name].weights += layer.other
        if self.options.kv_offload:
            wanted[name].kv += layer.kv
        for m in layer.matrices:
            at = off.get(m.name, name)
            if is_streamed and at == name:
                wanted[at].streamed[i] = wanted[at].streamed.get(i, 0) + m.n_bytes
                streamed.add(m.name)
            elif at != CPU:
                wanted[at].weights += m.n_bytes
        if not self._fits(wanted):
            return False
        made.taken, made.places[i] = wanted, name
        made.streamed |= streamed
        made.matrices |= {m: at for m, at in off.items() if at != name}
        return True

    def _pin_alone(self, made: Plan, layer: Layer) -> bool:
        """Matrices of a layer on the CPU that -ot sends to a device."""
        for m in layer.matrices:
            at = self.pinned.get(m.name, CPU)
            if at != CPU:
                if not self._take(made, m, at):
                    return False
        return True

    def _take(self, made: Plan, matrix: Matrix, name: str) -> bool:
        wanted = _copied(made.taken)
        wanted[name].weights += matrix.n_bytes
        if not self._fits(wanted):
            return False
        made.taken, made.matrices[matrix.name] = wanted, name
        return True

    def _fits(self, wanted: dict[str, Taken]) -> bool:
        for name, taken in wanted.items():
            is_used = taken.weights + taken.staging + taken.kv
            taken.workspace = self.sizes.workspace if is_used else 0
            if taken.total > self.budgets[name]:
                return False
        return True

    def _fill(self, made: Plan, n_moe: int) -> None:
        """Single matrices into what is left, from the layer below the offloaded ones down; experts
        that had to stay behind from the last layer down, and last."""
        loose: list[Matrix] = []
        for i in range(self.n_layers, -1, -1):
            layer = self._layer(i)
            for m in sorted(layer.matrices, key=lambda m: -m.n_bytes):
                is_out = made.place_of(i if i < self.n_layers else None, m.name) == CPU
                if m.is_expert and i < n_moe or m.name in self.pinned or layer.why:
                    continue
                if is_out and m.n_bytes >= LEAST_MATRIX:
                    loose.append(m)
        loose.sort(key=lambda m: m.is_expert)
        for m in loose:
            next((r for r in reversed(self.rooms) if self._take(made, m, r.name)), None)

    def _keep(self, made: Plan) -> None:
        """Streamed matrices that there is room for after all stay on the device: what is not copied
        costs nothing."""
        loose = [
            (i, m) for i, layer in enumerate(self.sizes.layers) for m in layer.matrices
            if m.name in made.streamed
        ]  # fmt: skip
        for i, m in sorted(loose, key=lambda found: -found[1].n_bytes):
            wanted, at = _copied(made.taken), made.place_of(i, m.name)
            wanted[at].weights += m.n_bytes
            wanted[at].streamed[i] -= m.n_bytes
            if not wanted[at].streamed[i]:
                del wanted[at].streamed[i]
            if self._fits(wanted):
                made.taken = wanted
                made.streamed.remove(m.name)

    def _note(self, made: Plan) -> None:
        """What is copied for each step, and devices that are too small; one that was not needed or
        not wanted is none."""
        for name, taken in made.taken.items():
            if taken.streamed:
                made.notes.append(
                    f"{name} has no room for {sum(taken.streamed.values()) / 1e6:,.1f} MB of "
                    f"{_ranges(sorted(taken.streamed)).lower()}: each step copies them there "
                    "(--stream-layers)."
                )
        for room in self.rooms:
            budget = self.budgets[room.name]
            wants_more = self.options.n_gpu_layers is None and CPU in made.places
            if not made.taken[room.name].total and (wants_more or budget < self.sizes.workspace):
                made.notes.append(
                    f"{room.name} is not used: {room.free / 1e6:,.1f} MB are free, of which "
                    f"{budget / 1e6:,.1f} MB may be taken (--fit-margin); rows alone need "
                    f"{self.sizes.workspace / 1e6:,.1f} MB."
                )


def _copied(taken: dict[str, Taken]) -> dict[str, Taken]:
    return {name: replace(t, streamed=dict(t.streamed)) for name, t in taken.items()}
