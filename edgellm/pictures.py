"""Pictures of results as PNG files, drawn by matplotlib, which is an extra."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from edgellm.errors import EdgeLLMError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MISSING = "A picture needs matplotlib: pip install 'edgellm[bench]' (--picture)."


def check(path: Path) -> None:
    """Raises what would keep ``save`` from saving there, before anything is measured."""
    if path.suffix.lower() != ".png":
        raise EdgeLLMError(f"{path} (--picture) must end in .png.")
    if not path.parent.is_dir():
        raise EdgeLLMError(f"{path} (--picture): there is no folder {path.parent}.")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise EdgeLLMError(_MISSING) from None


def save(figure: Figure, path: Path) -> None:
    """EdgeLLMError where the file cannot be written."""
    try:
        figure.savefig(path, dpi=100)
    except OSError as error:
        raise EdgeLLMError(f"{path} (--picture): {error.strerror or error}.") from None
