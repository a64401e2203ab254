"""The GPUs of this machine, under the names that plans use: cuda0, cuda1, …

A machine without a driver pays for one look for its library. ``EDGELLM_DEVICE`` is for tests and
developers: "cpu" opens nothing, "emulated", "emulated:512M" or "emulated:512M,64M" devices that run
the kernels on the CPU, slowly, with so much memory each (K, M, G; 1G where none is named).
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm.errors import EdgeLLMError
from edgellm.offload import Room

if TYPE_CHECKING:
    from edgellm.kernels.cuda.device import Device

_NVIDIA = Path("/proc/driver/nvidia/gpus")
_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(\d+)([KMG]?)")


def open_gpus() -> tuple[dict[str, Device], str]:
    """Devices by name and, when there is none to use, the reason in one sentence."""
    wanted = os.environ.get("EDGELLM_DEVICE", "")
    if wanted == "cpu":
        return {}, "No GPU is used: EDGELLM_DEVICE is cpu."
    if wanted.split(":")[0] == "emulated":
        return _emulated(wanted.partition(":")[2] or "1G"), ""
    if wanted:
        raise EdgeLLMError(
            f"EDGELLM_DEVICE is {wanted!r}; it can be cpu, emulated or emulated:SIZE."
        )
    if not has_driver():  # CuPy would say so too, after half a second of importing it
        return {}, f"No GPU is used: there is no NVIDIA driver here ({_DRIVER})."
    from edgellm.kernels.cuda.device import open_devices

    found, reason = open_devices()
    return {f"cuda{i}": device for i, device in enumerate(found)}, reason


def has_driver() -> bool:
    """Whether there is a GPU that could be used: the driver's library is there."""
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return False
    return True


def _emulated(sizes: str) -> dict[str, Device]:
    from edgellm.kernels.cuda.emulated import EmulatedDevice

    found: dict[str, Device] = {}
    for i, size in enumerate(sizes.split(",")):
        match = _SIZE.fullmatch(size.upper())
        if match is None:
            raise EdgeLLMError(f"EDGELLM_DEVICE: {size!r} is no size such as 512M.")
        found[f"cuda{i}"] = EmulatedDevice(int(match[1]) * _UNITS[match[2]])
    return found


def rooms(devices: Mapping[str, Device]) -> list[Room]:
    return [Room(name, *device.memory()) for name, device in devices.items()]


def nvidia_names(nvidia: Path = _NVIDIA) -> list[str]:
    """What the driver says is there, whether usable or not."""
    return sorted(filter(None, map(_model_name, nvidia.glob("*/information"))))


def _model_name(information: Path) -> str:
    try:
        for line in information.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "Model":
                return value.strip()
    except OSError:
        pass
    return ""
