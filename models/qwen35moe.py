"""Qwen3.5 with experts and a shared expert behind a gate."""

from __future__ import annotations

from edgellm.kernels.graph import Graph, Tensor
from edgellm.models import blocks, qwen2moe, qwen35
from edgellm.models.config import Config


def build(c: Config) -> Graph:
    return qwen35.build(c, _feed_forward)


def _feed_forward(g: Graph, c: Config, x: Tensor) -> Tensor:
    return g.add(blocks.experts_ffn(g, c, x, normalize=True), qwen2moe.shared_expert(g, c, x))
