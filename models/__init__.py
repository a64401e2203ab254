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
from edgellm.kernels.low_rank import LowRankPair, with_low_rank
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
    if gguf.string("general.type", "model") == "adapter":
        raise ModelError(
            gguf.path, 0, "general.type", "is adapter: give it as --lora, beside its model"
        )
    if name not in architectures():
        raise ModelError(
            gguf.path, 0, "general.architecture",
            f"is {name!r}, which is not supported; supported: {', '.join(architectures())}",
        )  # fmt: skip
    config = Config.read(gguf)
    graph: Graph = _module(name).build(config)
    if gguf.low_rank:
        graph = with_low_rank(graph, _low_rank(config))
        if unread := gguf.low_rank.keys() - graph.adapted.keys():
            raise ModelError(
                gguf.path, 0, f"tensor {min(unread)}",
                "is corrected by an adapter (--lora), but the model does not multiply by it",
            )  # fmt: skip
    return config, graph


def _low_rank(config: Config) -> dict[str, list[LowRankPair]]:
    """What adapters add to each matrix."""
    tensors = config.gguf.tensors
    return {
        name: [
            LowRankPair(
                config.weights(a, *tensors[a].shape, suffix=""),
                config.weights(b, *tensors[b].shape, suffix=""),
                scale,
            )
            for a, b, scale in pairs
        ]
        for name, pairs in config.gguf.low_rank.items()
    }
