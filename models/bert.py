"""BERT (arXiv:1810.04805) and its descendants for embeddings: every token sees the whole text."""

from __future__ import annotations

from edgellm.kernels.graph import Graph, Rope, Tensor
from edgellm.models import blocks
from edgellm.models.config import Config


def build(c: Config) -> Graph:
    g = Graph()
    x = g.add(token(g, c), g.position_rows(c.weights("position_embd", c.n_embd, c.n_ctx)))
    return encoder(g, c, x, None, blocks.plain_ffn)


def token(g: Graph, c: Config) -> Tensor:
    """Embeddings of the tokens, all of the first type ("sentence A")."""
    x = blocks.embedding(g, c)
    if "token_types" not in c.weights:
        return x
    n_types = c.gguf.integer("tokenizer.ggml.token_type_count", 2, low=1, high=1024)
    return g.add(x, c.weights("token_types", c.n_embd, n_types))


def encoder(
    g: Graph, c: Config, x: Tensor, rope: Rope | None, feed_forward: blocks.FeedForward
) -> Graph:
    """Layers with the norms behind their blocks; the output is a row for each token."""
    x = blocks.layer_norm(g, c, x, "token_embd_norm")
    for g.layer in range(c.n_layers):
        h = blocks.attention(g, c, x, rope, causal=False)
        x = blocks.layer_norm(g, c, g.add(x, h), "attn_output_norm")
        x = blocks.layer_norm(g, c, g.add(x, feed_forward(g, c, x)), "layer_output_norm")
    g.layer = None
    g.select(x)
    return g
