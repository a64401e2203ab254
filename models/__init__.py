"""Architectures: one file each, found by ``general.architecture``.

A file named like the architecture has one function, ``build(config) -> Graph``.
"""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

from edgellm.kernels.graph import Graph
from edgellm.models.config import Config, ModelError
from edgellm.quant.gguf import GGUF

_SHARED = {"__init__", "blocks", "config", "weights"}


def architectures() -> list[str]:
    """The architectures that can be run, by name."""
    files = Path(__file__).parent.glob("*.py")
    return sorted(f.stem.replace("_", "-") for f in files if f.stem not in _SHARED)


def title(name: str) -> str:
    """What an architecture is called, and its paper: what its file begins with."""
    return re.split(r":\s|\.\s", inspect.getdoc(_module(name)) or "", maxsplit=1)[0].rstrip(".")


def _module(name: str) -> ModuleType:
    return import_module(f"edgellm.models.{name.replace('-', '_')}")


def build_graph(gguf: GGUF) -> tuple[Config, Graph]:
    """The file's hyper-parameters and forward pass; GGUFError says what does not fit."""
    name = gguf.architecture
    if name not in architectures():
        raise ModelError(
            gguf.path, 0, "general.architecture",
            f"is {name!r}, which is not supported; supported: {', '.join(architectures())}",
        )  # fmt: skip
    config = Config.read(gguf)
    graph: Graph = _module(name).build(config)
    return config, graph
