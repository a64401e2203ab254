"""Which kernel runs which number format, for people."""

from __future__ import annotations

from edgellm.kernels.cpu import targets
from edgellm.kernels.cpu.weights import linear_kernel
from edgellm.quant import by_name


def kernel_for(type_name: str) -> tuple[str, bool]:
    """(kernel name, True for a packed kernel or False for decode-then-dot) on this target."""
    kernel = linear_kernel(by_name(type_name), targets.current())
    return kernel.name, kernel.is_packed
