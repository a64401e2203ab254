"""Nomic Embed (arXiv:2402.01613): BERT with rotation instead of learned positions, and SwiGLU."""

from __future__ import annotations

from edgellm.kernels.graph import Graph
from edgellm.models import bert, blocks
from edgellm.models.config import Config


def build(c: Config) -> Graph:
    g = Graph()
    return bert.encoder(g, c, bert.token(g, c), c.rope("neox"), blocks.gated_ffn)
