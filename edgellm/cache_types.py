"""The number formats that keys and values can be cached in, and which models can use them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.errors import EdgeLLMError

if TYPE_CHECKING:
    from edgellm.kernels.graph import Graph
    from edgellm.models.config import Config

CACHE_TYPES = ("f32", "f16", "q8_0", "q4_0")


def check_cache_types(config: Config, graph: Graph, type_k: str, type_v: str) -> None:
    """EdgeLLMError for a type that there is not, or that the model's heads cannot be cut into."""
    from edgellm.quant import by_name

    for name, kind in (("type_k", type_k), ("type_v", type_v)):
        if kind not in CACHE_TYPES:
            known = ", ".join(CACHE_TYPES)
            raise EdgeLLMError(f"{name} must be one of {known}, not {kind!r}.")
    for flag, kind, length, what in (
        ("-ctk", type_k, "head_dim", "keys"),
        ("-ctv", type_v, "v_dim", "values"),
    ):
        block = by_name(kind).block
        for op in graph.ops:
            if op.kind == "attention" and op.attrs[length] % block:
                raise EdgeLLMError(
                    f"{kind.upper()} stores {block} elements together, and the {what} of this "
                    f"{config.architecture} model have {op.attrs[length]} a head: use f16 or f32 "
                    f"({flag})."
                )
