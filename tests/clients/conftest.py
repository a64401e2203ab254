"""Environments for programs that edgellm is tested with."""

from __future__ import annotations

import subprocess
import tomllib
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

PINS = tomllib.loads((Path(__file__).parent / "requirements.toml").read_text())


@pytest.fixture(scope="session")
def python_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function from a name in requirements.toml to an interpreter that has its packages; skips
    where no package index can be reached. It also sees the folders in ``beside``."""
    folder = tmp_path_factory.mktemp("environments")

    def get(name: str, beside: tuple[str, ...] = ()) -> Path:
        target = folder / name
        venv.create(target, with_pip=True)
        python = target / "bin" / "python"
        (site,) = target.glob("lib/python*/site-packages")
        (site / "beside.pth").write_text("\n".join(beside))
        done = subprocess.run(
            [python, "-m", "pip", "install", "-q", *PINS["python"][name]],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            pytest.skip(f"{name} cannot be installed: {done.stderr[-200:]}")
        return python

    return get
