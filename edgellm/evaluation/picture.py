"""Divergence over position as a picture: a PNG by matplotlib, or letters on a terminal."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgellm import pictures
from edgellm.evaluation.divergence import Divergence

_LEVELS = " ▁▂▃▄▅▆▇█"


def by_position(found: Divergence, n: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Positions and the mean over chunks of the divergence there, in n groups of neighbours."""
    means = found.kl.mean(axis=0)
    groups = np.array_split(np.arange(len(means)), min(n, len(means)))
    at = np.array([found.first + group.mean() for group in groups])
    return at, np.array([means[group].mean() for group in groups])


def as_letters(found: Divergence, width: int = 64) -> str:
    """A bar for each group of positions, the highest of full height."""
    at, values = by_position(found, width)
    top = float(values.max())
    bars = "".join(_LEVELS[round(v / (top or 1) * (len(_LEVELS) - 1))] for v in values)
    return f"KL by position {at[0]:.0f} to {at[-1]:.0f}, highest {top:.2g}: {bars}"


def draw(path: Path, found: Divergence, names: tuple[str, str]) -> None:
    """PNG: mean and 95th percentile over the chunks, by position. EdgeLLMError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    axis = figure.subplots()
    positions = found.first + np.arange(found.kl.shape[1])
    axis.plot(positions, found.kl.mean(axis=0), label="mean", linewidth=0.6, color="tab:blue")
    axis.plot(positions, np.percentile(found.kl, 95, axis=0), label="95th percentile",
              linewidth=0.6, color="tab:orange", alpha=0.6)  # fmt: skip
    at, values = by_position(found, 32)
    axis.plot(at, values, label="mean of neighbours", color="black")
    axis.set_xlabel("position in the chunk, tokens")
    axis.set_ylabel("KL divergence, nats")
    axis.set_ylim(bottom=0)
    axis.set_title(f"{names[0]} against {names[1]}")
    axis.legend()
    pictures.save(figure, path)
