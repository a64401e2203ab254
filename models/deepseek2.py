"""DeepSeek V2 and V3 (arXiv:2405.04434, 2412.19437): keys and values of all heads come from one
short latent vector, which is all that is cached; experts beside shared ones."""

from __future__ import annotations

from dataclasses import replace

from edgellm.kernels.graph import Graph, Rope, Tensor
from edgellm.models import blocks
from edgellm.models.config import Config, yarn_magnitude


def build(c: Config) -> Graph:
    g, rope = Graph(), c.rope("norm")
    if c.yarn_log_multiplier:  # the scores' scale takes over all of YaRN's magnitude
        rope = replace(rope, magnitude=1.0)
    x = blocks.embedding(g, c)
    for g.layer in range(c.n_layers):
        h = blocks.rms_norm(g, c, x, "attn_norm")
        x = g.add(x, _latent_attention(g, c, h, rope))
        h = blocks.rms_norm(g, c, x, "ffn_norm")
        x = g.add(x, blocks.mixed_ffn(g, c, h, blocks.SOFTMAX))
    blocks.logits(g, c, x)
    return g


def _latent_attention(g: Graph, c: Config, x: Tensor, rope: Rope) -> Tensor:
    """A head's key is k_b @ latent beside a rotated part that all heads share. Files that hold k_b
    and v_b apart let the query meet the latent vector itself: q @ (k_b @ latent) is
    (q @ k_b) @ latent, so one key-value head serves all."""
    w, layer = c.weights, g.layer or 0
    n_heads, n_rope = c.heads[layer], c.rope_dim
    n_latent = c.integer("attention.kv_lora_rank", 16, 1 << 16)
    # key_length is that of a head, or of the latent vector where files say the head's apart
    n_key = c.integer("attention.key_length_mla", n_rope + 1, 4096, c.head_dim)
    n_value = c.integer("attention.value_length_mla", 1, 4096, c.v_dim)
    n_plain = n_key - n_rope
    if n_plain < 1:
        raise c.refuse("attention.key_length", f"is {n_key}; its rotated part alone has {n_rope}")
    q = _queries(g, c, x, n_heads * n_key)
    q_plain = g.slice(q, 0, n_plain, n_key)
    q_rope = g.rope(g.slice(q, n_plain, n_rope, n_key), n_rope, rope)
    both = blocks.linear(g, c, x, "attn_kv_a_mqa", n_latent + n_rope)
    latent = blocks.rms_norm(g, c, g.slice(both, 0, n_latent), "attn_kv_a_norm")
    k_rope = g.rope(g.slice(both, n_latent, n_rope), n_rope, rope)
    # files hold a tenth of the multiplier
    scale = yarn_magnitude(1 / rope.freq_scale, 10 * c.yarn_log_multiplier) ** 2 * n_key**-0.5
    k_b, v_b = (blocks.named(g, f"attn_{name}_b") for name in "kv")
    if k_b in w:
        q = g.join(g.head_linear(q_plain, w(k_b, n_plain, n_latent, n_heads)), q_rope, n_heads)
        out = g.attention(q, g.join(latent, k_rope, 1), latent,
                          n_heads=n_heads, n_kv_heads=1, scale=scale)  # fmt: skip
        out = g.head_linear(out, w(v_b, n_latent, n_value, n_heads))
    else:
        n = n_plain + n_value
        kv = blocks.linear(g, c, latent, "attn_kv_b", n_heads * n)
        k = g.join(g.slice(kv, 0, n_plain, n), k_rope, n_heads, shared=True)
        q, v = g.join(q_plain, q_rope, n_heads), g.slice(kv, n_plain, n_value, n)
        out = g.attention(q, k, v, n_heads=n_heads, n_kv_heads=n_heads, scale=scale)
    return blocks.linear(g, c, out, "attn_output", c.n_embd)


def _queries(g: Graph, c: Config, x: Tensor, n_out: int) -> Tensor:
    """Directly, or through a short vector too."""
    if blocks.named(g, "attn_q") in c.weights:
        return blocks.linear(g, c, x, "attn_q", n_out)
    rank = c.integer("attention.q_lora_rank", 1, 1 << 16)
    short = blocks.linear(g, c, x, "attn_q_a", rank)
    return blocks.linear(g, c, blocks.rms_norm(g, c, short, "attn_q_a_norm"), "attn_q_b", n_out)
