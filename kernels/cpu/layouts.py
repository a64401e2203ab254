"""Which number formats have a packed layout; the others run by decode-then-dot."""

from __future__ import annotations

from edgellm.kernels.cpu.layout import PackedLayout
from edgellm.kernels.cpu.layouts_32 import Packed32, PackedMXFP4
from edgellm.kernels.cpu.layouts_iq import (
    PackedIQ2S,
    PackedIQ2XS,
    PackedIQ2XXS,
    PackedIQ3S,
    PackedIQ3XXS,
)
from edgellm.kernels.cpu.layouts_k import (
    PackedIQ4XS,
    PackedQ2K,
    PackedQ3K,
    PackedQ4K,
    PackedQ6K,
)

LAYOUTS: dict[str, PackedLayout] = {
    layout.type_name: layout
    for layout in (
        Packed32("q4_0", 4),
        Packed32("q4_1", 4, has_minimum=True),
        Packed32("q5_0", 5),
        Packed32("q5_1", 5, has_minimum=True),
        Packed32("q8_0", 8),
        Packed32("iq4_nl", 4),
        PackedMXFP4(),
        PackedQ2K(),
        PackedQ3K(),
        PackedQ4K("q4_k"),
        PackedQ4K("q5_k"),
        PackedQ6K(),
        PackedIQ4XS(),
        PackedIQ3S(),
        PackedIQ3XXS(),
        PackedIQ2S(),
        PackedIQ2XS(),
        PackedIQ2XXS(),
    )
}
