"""Architectures: one file each, found by ``general.architecture``.

A file named like the architecture has one function, ``build(config) -> Graph``.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from edgellm.kernels.graph import Graph
from edgellm.models.config import Config, ModelError
from edgellm.quant.gguf import GGUF

_SHARED = {"__init__", "blocks", "config"}


def architectures() -> list[str]:
    """The architectures that can be run, by name."""
    files = Path(__file__).parent.glob("*.py")
    return sorted(f.stem.replace("_", "-") for f in files if f.stem not in _SHARED)


def build_graph(gguf: GGUF) -> tuple[Config, Graph]:
    """The file's hyper-parameters and forward pass; GGUFError says what does not fit."""
    name = gguf.architecture
    if name not in architectures():
        raise ModelError(
            gguf.path, 0, "general.architecture",
            f"is {name!r}, which is not supported; supported: {', '.join(architectures())}",
        )  # fmt: skip
    config = Config.read(gguf)
    module = import_module(f"edgellm.models.{name.replace('-', '_')}")
    graph: Graph = module.build(config)
    return config, graph
