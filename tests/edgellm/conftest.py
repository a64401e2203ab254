"""Fixtures that several tests of the engine share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from edgellm.kernels.cuda.emulated import EmulatedDevice
from edgellm.speculative import speculation
from edgellm.speculative.draft_model import DraftModel


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, emulator: None) -> Callable[..., list[EmulatedDevice]]:
    """Emulated devices that the models of the test get."""

    def use(*totals: int, policy: str = "lazy") -> list[EmulatedDevice]:
        made = [EmulatedDevice(total, policy, seed=i) for i, total in enumerate(totals)]
        named = {f"cuda{i}": device for i, device in enumerate(made)}
        monkeypatch.setattr("edgellm.placement.open_gpus", lambda: (named, ""))
        return made

    return use


def _allocate(gains: list[list[float]], seconds: Callable[[int], float], room: int) -> list[int]:
    counts = []
    for mine in gains:
        counts.append(min(len(mine), room))
        room -= counts[-1]
    return counts


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is guessed and checked, whatever it costs: tiny models are too fast for any to pay."""
    monkeypatch.setattr(speculation, "allocate", _allocate)
    monkeypatch.setattr(DraftModel, "_length", lambda self, wanted: 5 if wanted else 0)
    monkeypatch.setattr(DraftModel, "_least", lambda self, use, n: 0.0)
    monkeypatch.setattr(DraftModel, "_pays", lambda self, sequence, use, n: True)
