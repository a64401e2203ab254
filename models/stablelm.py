"""StableLM 2 (arXiv:2402.17834): Llama with layer norms and a quarter of each head rotated. The 12B
normalizes queries and keys and adds attention and feed-forward together."""

from __future__ import annotations

from edgellm.kernels.graph import Graph, Tensor
from edgellm.models import blocks
from edgellm.models.config import Config


def build(c: Config) -> Graph:
    g, rope = Graph(), c.rope("neox")
    x = blocks.embedding(g, c)
    for g.layer in range(c.n_layers):
        first = blocks.layer_norm(g, c, x, "attn_norm")
        x = g.add(x, blocks.attention(g, c, first, rope, qk_norm=_head_norm))
        is_parallel = blocks.named(g, "ffn_norm") not in c.weights
        h = first if is_parallel else blocks.layer_norm(g, c, x, "ffn_norm")
        x = g.add(x, blocks.gated_ffn(g, c, h))
    blocks.logits(g, c, x, blocks.layer_norm)
    return g


def _head_norm(g: Graph, c: Config, x: Tensor, name: str) -> Tensor:
    """Where the file has it, a norm of each head with weights of its own."""
    name = blocks.named(g, name)
    if name not in c.weights:
        return x
    weight = c.weights.vector(name, c.head_dim, x.dim // c.head_dim)
    return g.layer_norm(x, weight, None, c.eps)
