"""Emulated GPUs for models."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from edgellm.kernels.cuda.emulated import EmulatedDevice


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, emulator: None) -> Callable[..., list[EmulatedDevice]]:
    """Emulated devices that the models of the test get."""

    def use(*totals: int, policy: str = "lazy") -> list[EmulatedDevice]:
        made = [EmulatedDevice(total, policy, seed=i) for i, total in enumerate(totals)]
        named = {f"cuda{i}": device for i, device in enumerate(made)}
        monkeypatch.setattr("edgellm.placement.open_gpus", lambda: (named, ""))
        return made

    return use
