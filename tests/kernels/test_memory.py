"""Memory that was asked for in huge pages can get them."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgellm.kernels.cpu.memory import allocate

MAPS = Path("/proc/self/smaps")


def mapping_of(address: int) -> tuple[str, list[str]]:
    """Permissions and kernel flags of the mapping that holds an address."""
    permissions, is_mine = "", False
    for line in MAPS.read_text().splitlines():
        first, *rest = line.split()
        if "-" in first:
            start, end = (int(part, 16) for part in first.split("-"))
            is_mine, permissions = start <= address < end, rest[0]
        elif is_mine and first == "VmFlags:":
            return permissions, rest
    raise AssertionError("no mapping holds the address")


@pytest.mark.skipif(not MAPS.exists(), reason="Linux tells what memory is like")
def test_weights_may_lie_in_huge_pages() -> None:
    """Linux gives them to private memory only (shared memory has a setting of its own, off)."""
    memory = allocate(8 << 20, huge=True)
    permissions, flags = mapping_of(memory.ctypes.data)
    assert permissions.endswith("p")
    if Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        assert "hg" in flags
    assert memory.ctypes.data % (2 << 20) == 0 and not memory.any()
