"""Energy that the processor has used, where it says so (Linux, RAPL)."""

from __future__ import annotations

from pathlib import Path

_POWERCAP = Path("/sys/class/powercap")


def energy_joules(folder: Path = _POWERCAP) -> float | None:
    """Joules of all processor packages since some moment; None where they cannot be read (many
    systems let only root). The counters wrap after minutes to hours."""
    joules = None
    for package in sorted(folder.glob("intel-rapl:*")):
        if package.name.count(":") > 1:  # a part of a package, counted in it already
            continue
        try:
            joules = (joules or 0.0) + int((package / "energy_uj").read_text()) / 1e6
        except (OSError, ValueError):
            return None
    return joules
