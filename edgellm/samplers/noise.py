"""Noise that is a pure function of its key: the sampler has no generator that could run ahead.

A counter-based generator: the numbers of the key are folded into 64 bits, one finaliser of
splitmix64 each; the i-th draw is the i-th output of the splitmix64 stream that starts there.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

# What a draw is for: another purpose is another stream. The choice of the token itself has none.
XTC = 1

# Constants of splitmix64 (Steele, Lea and Flood 2014): the odd increment and its finaliser.
_STRIDE, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def _mix(x: int) -> int:
    """splitmix64's finaliser: every bit of the input reaches every bit of the output."""
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def _key(*numbers: int) -> int:
    key = 0
    for number in numbers:
        key = _mix((key + (number + 1) * _STRIDE) & _MASK)
    return key


def keyed_uniform(seed: int, choice: int, position: int, purpose: int) -> float:
    """One number inside (0, 1)."""
    x = _mix((_key(seed, choice, position, purpose) + _STRIDE) & _MASK)
    return ((x >> 12) + 0.5) * 2.0**-52


def keyed_gumbel(
    seed: int, choice: int, position: int, ids: npt.NDArray[np.integer[Any]]
) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise for each id, a pure function of (seed, choice, position, id)."""
    x = ids.astype(np.uint64)
    x += np.uint64(1)
    x *= np.uint64(_STRIDE)
    x += np.uint64(_key(seed, choice, position))
    x ^= x >> np.uint64(30)
    x *= np.uint64(_MIX_1)
    x ^= x >> np.uint64(27)
    x *= np.uint64(_MIX_2)
    x ^= x >> np.uint64(31)
    # 52 bits and a half step stay strictly inside (0, 1); with 53 the top value rounds to 1.
    uniform = ((x >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    noise: npt.NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise
