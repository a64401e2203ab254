"""Functions of users, compiled.

A user sampler is plain Python, ``fn(logits, tokens, position)``, which changes the logits in place:

    def no_repeat(logits, tokens, position):
        if len(tokens):
            logits[tokens[-1]] = -np.inf

Numba turns it into machine code, so a loop over the whole vocabulary is fine there. Indices are
checked: a mistake is an IndexError, never a broken process.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from edgellm.kernels.cpu import targets


class UserSamplerError(ValueError):
    """A function given as a sampler cannot be one."""


def compile_sampler(function: Callable[..., Any]) -> Callable[..., Any]:
    """Machine code of fn(logits: float32[n_vocab], tokens: int64[n], position: int) -> None.
    Raises UserSamplerError, whose message names the function."""
    name = getattr(function, "__name__", None) or repr(function)
    if not inspect.isfunction(function):
        raise UserSamplerError(
            f"The sampler {name} is not a plain Python function of (logits, tokens, position)."
        )
    parameters = inspect.signature(function).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) != 3 or len(positional) != len(parameters):
        raise UserSamplerError(
            f"The sampler {name} must take exactly (logits, tokens, position), not "
            f"{inspect.signature(function)}."
        )
    targets.configure_numba()
    from numba import njit, types

    row = types.Array(types.float32, 1, "C")
    history = types.Array(types.int64, 1, "C", readonly=True)
    try:
        compiled: Any = njit(nogil=True, boundscheck=True)(function)
        compiled.compile((row, history, types.int64))
    except Exception as error:  # of several families, one of them plain Exceptions
        raise UserSamplerError(
            f"The sampler {name} cannot be compiled by Numba: {_reason(error)}."
        ) from None
    (signature,) = compiled.signatures
    result = compiled.overloads[signature].signature.return_type
    if result != types.none:
        raise UserSamplerError(
            f"The sampler {name} must change the logits in place and return nothing."
        )
    compiled.disable_compile()  # what does not fit the signature is an error, not another version
    return compiled  # type: ignore[no-any-return]


def _reason(error: Exception) -> str:
    """The first line of a message of Numba that says what is wrong, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    headings = ("Failed in", "During: ", "File ", "Compilation is falling back", "- Resolution")
    for line in lines:
        if not line.startswith(headings) and any(character.isalpha() for character in line):
            return line.split(" Raised from")[0].rstrip(".: ")
    return type(error).__name__
