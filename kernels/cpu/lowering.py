"""What a lowering is: a function that turns one op into stages and buffers of a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.graph import Op, Tensor
from edgellm.kernels.split import Part

if TYPE_CHECKING:
    from edgellm.kernels.cpu.program import Program

Lowering = Callable[["Program", Op], None]


class PartRunner(Protocol):
    """A device that runs parts of the graph."""

    def run(self, part: Part, rows: Callable[[Tensor], NDArray[np.float32]]) -> None:
        """Compute the part for the step at hand. ``rows`` is a tensor's rows of the step in the
        CPU's memory [n, dim]: what the part reads is there, what it writes is to be put there."""


class ProgramError(ValueError):
    """The graph asks for something the CPU back end cannot do."""


def check_vectors(op: Op, n: int) -> None:
    """Sums over a run of n elements have no masked tail: runs must be whole vectors."""
    if n % 16:
        raise ProgramError(f"{op.label}: runs of {n} elements are no multiple of 16 long")


def float_bits(value: float) -> int:
    """A number as a kernel's argument."""
    return int(np.float32(value).view(np.uint32))
