"""Which layer runs where, in which types, and how many bytes that is: one screen."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

from edgellm.kernels.graph import MATRIX_OPS, Graph
from edgellm.offload import CPU, Plan


def placement_report(
    plan: Plan, graph: Graph, type_k: str, type_v: str, names: dict[str, str]
) -> list[str]:
    """Lines. ``names`` are those of devices, by their place."""
    weights: dict[int | None, dict[str, tuple[str, int]]] = {}
    for op in graph.ops:
        if op.kind in MATRIX_OPS:
            w = op.weights["weight"]
            n = w.type.row_bytes(w.n_in) * w.n_out * (w.shape[2] if len(w.shape) > 2 else 1)
            weights.setdefault(op.layer, {})[w.name] = (w.type.name, n)
    n_layers, lines = len(plan.places) - 1, []
    for place, run in groupby(range(n_layers), key=lambda i: plan.places[i]):
        layers = list(run)
        mine = {k: v for i in layers for k, v in weights.get(i, {}).items()}
        own = {k: v for k, v in mine.items() if plan.matrices.get(k, place) == place}
        kv = f", keys {type_k} and values {type_v}"
        elsewhere = "" if plan.kv_offload or place == CPU else " on the CPU"
        lines.append(
            f"{_layers(layers)} on {_name(place, names)}: {_types(own)}{kv}{elsewhere}"
        )  # fmt: skip
        if copied := {k: v for k, v in own.items() if k in plan.streamed}:
            lines.append(
                f"  of which {len(copied)} of {len(mine)} matrices wait in the host's memory, and "
                f"are copied for each step: {_types(copied)}"
            )
        away = {k: v for k, v in mine.items() if k not in own}
        for other in dict.fromkeys(plan.matrices[k] for k in away):
            there = {k: v for k, v in away.items() if plan.matrices[k] == other}
            lines.append(
                f"  but {len(there)} of {len(mine)} matrices on {_name(other, names)}: "
                f"{_types(there)}"
            )
    output = weights.get(None, {})
    if output:
        place = plan.place_of(None, next(iter(output)))
        lines.append(f"output on {_name(place, names)}: {_types(output)}")
    for name, taken in plan.taken.items():
        if taken.total:
            staging = f", room for copies {_mb(taken.staging)}" if taken.staging else ""
            lines.append(
                f"{_name(name, names)}: weights {_mb(taken.weights)}{staging}, keys and values "
                f"{_mb(taken.kv)}, rows {_mb(taken.workspace)}"
            )
    return [*lines, *plan.notes]


def _name(place: str, names: dict[str, str]) -> str:
    if place == CPU:
        return "the CPU"
    return f"{place} ({names[place]})" if place in names else place


def _layers(numbers: list[int]) -> str:
    first, last = numbers[0], numbers[-1]
    return f"layer {first}" if first == last else f"layers {first}-{last}"


def _types(matrices: dict[str, tuple[str, int]]) -> str:
    """By bytes: 12.3 MB of q4_k and q6_k."""
    sizes: Counter[str] = Counter()
    for kind, n in matrices.values():
        sizes[kind] += n
    if not sizes:
        return "no matrices"
    return f"{_mb(sum(sizes.values()))} of {', '.join(k for k, _ in sizes.most_common())}"


def _mb(n: int) -> str:
    return f"{n / 1e9:.2f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"
