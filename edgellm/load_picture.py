"""A picture of a load: when requests came, how long they took, how many were there at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edgellm import pictures
from edgellm.serving_records import Record

_COLOURS = {"ttft": "tab:blue", "e2e": "tab:orange", "tpot": "tab:green"}


def draw(path: Path, records: list[Record]) -> None:
    """PNG: over the time of arrival, first token and end of every answer (s) and time of a token
    (ms); what failed or was turned away as crosses; below, the requests that were open."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 8), layout="constrained")
    axes = figure.subplots(3, 1, sharex=True)
    done = [r for r in records if r.is_complete]
    lost = [r for r in records if not r.is_complete and not r.is_cancelled]
    for axis, names, unit, factor in (
        (axes[0], ("ttft", "e2e"), "s", 1.0), (axes[1], ("tpot",), "ms", 1e3),
    ):  # fmt: skip
        for name in names:
            points = [(r.arrived, factor * v) for r in done if (v := getattr(r, name)) is not None]
            if points:
                axis.plot(*zip(*points, strict=True), ".", color=_COLOURS[name],
                          label=f"{name.upper()} ({len(points)})")  # fmt: skip
        axis.set_ylabel(unit)
        axis.set_ylim(bottom=0)
    if lost:
        ends = [(r.arrived, (r.finished or r.arrived) - r.arrived) for r in lost]
        axes[0].plot(*zip(*ends, strict=True), "x", color="tab:red",
                     label=f"failed or turned away ({len(lost)})")  # fmt: skip
    for axis in axes[:2]:
        if axis.get_legend_handles_labels()[1]:
            axis.legend(loc="upper left")
    times, counts = _open(records)
    axes[2].step(times, counts, where="post", color="tab:gray")
    axes[2].set_ylabel("open requests")
    axes[2].set_xlabel("arrival, s")
    axes[2].set_ylim(bottom=0)
    pictures.save(figure, path)


def _open(records: list[Record]) -> tuple[list[float], list[int]]:
    """How many requests were open, from every change on."""
    changes = [(r.arrived, 1) for r in records]
    changes += [(r.finished, -1) for r in records if r.finished is not None]
    changes.sort()
    return [at for at, _ in changes], np.cumsum([n for _, n in changes]).tolist()
