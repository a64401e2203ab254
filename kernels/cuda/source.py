"""The text of kernels: a file of this folder with what it includes, and what it is compiled for.

A kernel's name is "file/function" or "file/variant/function": "linear/q4_k/matvec_1" is `matvec_1`
of linear.cu with WEIGHTS defined as q4_k. Each file and variant is one module, compiled when the
first of its kernels is asked for. Text is put together here, so that compilers see one piece
without includes of ours: CuPy's cache does not look into included files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent

# What the parts of a variant define, by file: "f16-f16-128-128" is four parts.
VARIANTS = {
    "linear": ("WEIGHTS",),
    "linear_float": ("WEIGHTS",),
    "attention": ("KEYS", "VALUES", "HEAD_DIM", "V_DIM"),
}
_INCLUDE = re.compile(r'^#include "([\w.]+)"$', re.MULTILINE)
_KERNEL = re.compile(
    r'extern "C" __global__ void(?:\s+__launch_bounds__\((\d+)(?:, \d+)?\))?\s+(\w+)\('
)


@dataclass(frozen=True)
class Source:
    """One module: its text and its macros, "WEIGHTS" -> "q4_k"."""

    name: str
    text: str
    defines: tuple[tuple[str, str], ...] = ()

    @property
    def kernels(self) -> dict[str, int]:
        """The kernels in the text, and the threads of a block each is bounded to."""
        return {name: int(bound or 1024) for bound, name in _KERNEL.findall(self.text)}

    @property
    def options(self) -> tuple[str, ...]:
        return tuple(f"-D{name}={value}" for name, value in self.defines)


@cache
def module(name: str) -> Source:
    """The module of a file and variant, "linear/q4_k" or "norms"."""
    stem, _, variant = name.partition("/")
    names = VARIANTS.get(stem, ())
    parts = variant.split("-") if variant else []
    if len(parts) != len(names):
        raise ValueError(f"{name}: {stem}.cu is compiled for {', '.join(names) or 'nothing'}")
    return Source(name, _expanded(f"{stem}.cu", set()), tuple(zip(names, parts, strict=True)))


def split(kernel: str) -> tuple[str, str]:
    """A kernel's name as module and function."""
    name, _, function = kernel.rpartition("/")
    return name, function


def _expanded(file: str, seen: set[str]) -> str:
    """The file's text with our includes put in once each; #line keeps messages true."""
    seen.add(file)
    text = (FOLDER / file).read_text(encoding="utf-8")

    def included(match: re.Match[str]) -> str:
        line = text[: match.start()].count("\n") + 2
        inner = "" if match[1] in seen else _expanded(match[1], seen)
        return f'{inner}\n#line {line} "{file}"'

    return f'#line 1 "{file}"\n' + _INCLUDE.sub(included, text)
