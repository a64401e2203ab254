"""Devices for the tests of the CUDA back end: `pytest --device cuda` runs them on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edgellm.kernels.cuda.device import Device, open_devices
from edgellm.kernels.cuda.emulated import EmulatedDevice
from edgellm.kernels.cuda.emulator import ORDERS

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def device_kind(request: pytest.FixtureRequest) -> str:
    kind: str = request.config.getoption("--device")
    if kind == "emulated":
        request.getfixturevalue("emulator")
    return kind


@pytest.fixture(scope="session")
def devices(device_kind: str) -> list[Device]:
    """What a kernel has to give the same on: the GPU, or the emulator in its thread orders."""
    if device_kind == "emulated":
        return [EmulatedDevice(policy="eager", order=order) for order in ORDERS]
    found, reason = open_devices()
    if not found:
        pytest.fail(reason)
    return found[:1]


@pytest.fixture
def emulated(emulator: None) -> Callable[..., EmulatedDevice]:
    """Makes emulated devices, whatever --device says."""
    return EmulatedDevice
