"""A model's layers onto this machine's devices: the plan that it is loaded with.

Without a context being asked for, the cache is made small enough for all layers to find room on
the GPU, if that leaves a usable one. Layers that find none are computed by the CPU, or streamed
where that is foretold to be faster. Memory that turns out to be short is planned again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edgellm.gpus import has_driver, open_gpus, rooms
from edgellm.kernels.cpu.inputs import Limits
from edgellm.kernels.graph import Graph
from edgellm.offload import ALL, CPU, OffloadError, Options, Plan, Sizes, cpu_only
from edgellm.runner import Offload, Runner

if TYPE_CHECKING:
    from edgellm.kernels.cuda.device import Device

LEAST_CACHE = 4096  # tokens, below which layers leave the GPU rather than the cache gets smaller
_TRIES = 4


@dataclass(frozen=True)
class Placement:
    """``plan`` holds for ``limits``; ``offload`` None: nothing is on a GPU. ``least_ctx`` tokens of
    cache were asked for; None: any."""

    plan: Plan
    limits: Limits
    devices: Mapping[str, Device]
    least_ctx: int | None = None

    @property
    def offload(self) -> Offload | None:
        return Offload(self.plan, self.devices) if self.plan.uses_device else None

    @property
    def used(self) -> dict[str, Device]:
        """Devices that have something of the model."""
        taken = self.plan.taken
        return {name: d for name, d in self.devices.items() if name in taken and taken[name].total}


def place(
    graph: Graph, n_layers: int, limits: Limits, options: Options, least_ctx: int | None
) -> Placement:
    """``least_ctx`` tokens of cache were asked for; None: any. OffloadError for options that name
    what is not there."""
    placed = _placed(graph, n_layers, limits, options, least_ctx)
    if options.n_cpu_moe and not any(op.kind == "moe_linear" for op in graph.ops):
        placed.plan.notes.append(
            "The model has no experts that could stay on the CPU (--cpu-moe, --n-cpu-moe)."
        )
    return placed


def _placed(
    graph: Graph, n_layers: int, limits: Limits, options: Options, least_ctx: int | None
) -> Placement:
    if options.n_gpu_layers == 0:
        _check_needs(options, "--ngl 0 uses none.")
        return Placement(cpu_only(n_layers), limits, {})
    devices, reason = open_gpus()
    if not devices and options.n_gpu_layers is not None:
        raise OffloadError(f"No layer can go to a GPU (--ngl). {reason}")
    if not devices:  # a GPU that is there and is not used is said so
        _check_needs(options, reason)
        return Placement(cpu_only(n_layers, reason if has_driver() else ""), limits, {})
    return _planned(graph, n_layers, limits, options, least_ctx, devices)


def _check_needs(options: Options, why: str) -> None:
    """Without a GPU nothing can be sent to one."""
    if options.stream == "on":
        raise OffloadError(f"Streaming layers (--stream-layers on) needs a GPU. {why}")
    for pattern, place in options.overrides:
        if place != CPU:
            raise OffloadError(f"-ot {pattern}={place} needs a GPU. {why}")


def _planned(
    graph: Graph, n_layers: int, limits: Limits, options: Options, least_ctx: int | None,
    devices: Mapping[str, Device],
) -> Placement:  # fmt: skip
    from edgellm.offload_sizes import device_sizes, fitted_plan

    there, smaller = rooms(devices), limits
    sizes = device_sizes(graph, n_layers, limits)
    if options.n_gpu_layers is None or options.n_gpu_layers == ALL:
        budget = sum(room.budget(options.fit_margin) for room in there)
        smaller = _shrunk(sizes, limits, budget, least_ctx)
        if smaller is not limits:
            sizes = device_sizes(graph, n_layers, smaller)
    made = fitted_plan(graph, sizes, smaller, there, options)
    if options.stream == "auto" and CPU in (*made.places, *made.matrices.values()):
        streamed = fitted_plan(graph, sizes, smaller, there, replace(options, stream="on"))
        if streamed.streamed and _is_faster(streamed, made, graph, smaller, devices):
            made = streamed
    if smaller.n_blocks < limits.n_blocks:
        made.notes.append(
            f"The cache has {smaller.n_blocks * smaller.block} tokens: more would not fit on the "
            "GPU beside the weights (-c)."
        )
    return Placement(made, smaller, devices, least_ctx)


def _is_faster(
    one: Plan, other: Plan, graph: Graph, limits: Limits, devices: Mapping[str, Device]
) -> bool:
    """Whether a usual request takes less time, by what this machine is measured to reach."""
    from edgellm.forecast import Forecast
    from edgellm.speeds import measure

    speeds = measure(devices, limits.n_threads)
    seconds = [
        Forecast(graph, plan, limits.k_type, limits.v_type, speeds).request_seconds()
        for plan in (one, other)
    ]
    return seconds[0] < seconds[1]


def _shrunk(sizes: Sizes, limits: Limits, budget: int, least_ctx: int | None) -> Limits:
    """The limits with fewer blocks of cache where all layers fit then."""
    kv = sum(layer.kv for layer in sizes.layers)
    if not sizes.workspace < budget < sizes.total or not kv or limits.window is not None:
        return limits
    least = min(least_ctx or LEAST_CACHE, limits.n_blocks * limits.block)
    room = budget - (sizes.total - kv)
    n_blocks = int(limits.n_blocks * room / kv) if room > 0 else 0
    n_blocks = max(n_blocks, -(-least // limits.block))
    if n_blocks >= limits.n_blocks:
        return limits
    n_ctx = min(limits.n_ctx, n_blocks * limits.block)
    return replace(limits, n_blocks=n_blocks, n_ctx=n_ctx)


def load(
    placement: Placement,
    options: Options,
    graph: Graph,
    make: Callable[[Limits, Offload | None], Runner],
) -> tuple[Runner, Placement]:
    """The model in memory, with less on the GPU each time it turns out to be full."""
    for _ in range(_TRIES):
        offload = placement.offload
        if offload is None:
            break
        from edgellm.kernels.cuda.device import OutOfDeviceMemory, OutOfHostMemory

        try:
            return make(placement.limits, offload), placement
        except (OutOfDeviceMemory, OutOfHostMemory) as error:
            if isinstance(error, OutOfDeviceMemory):
                note = f"{error} Fewer layers go there."
                options = replace(options, fit_margin=_more(placement, options))
            elif placement.plan.streamed:
                note = f"{error} No layer is streamed (--stream-layers)."
                options = replace(options, stream="off")
            else:
                raise
            made = _planned(
                graph, len(placement.plan.places) - 1, placement.limits, options,
                placement.least_ctx, placement.devices,
            )  # fmt: skip
            made.plan.notes.insert(0, note)
            placement = made
    if placement.offload is not None:
        note = "The GPU has no room for this model: all layers run on the CPU."
        placement = replace(
            placement, plan=cpu_only(len(placement.plan.places) - 1, note), devices={}
        )
    return make(placement.limits, None), placement


def _more(placement: Placement, options: Options) -> int:
    """A margin that keeps back a tenth more of the largest device."""
    there = rooms(placement.devices)
    now = max(r.free - r.budget(options.fit_margin) for r in there)
    return now + max(r.total for r in there) // 10
