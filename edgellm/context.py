"""How long a sequence may be: by request, by the model, by memory and by the context policy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from edgellm.errors import EdgeLLMError
from edgellm.kernels.cpu.kv_types import BLOCK
from edgellm.memory import STATE_SLOTS, STEP_TOKENS, available_bytes, bill
from edgellm.models.config import Config
from edgellm.quant.gguf import GGUF

SINKS = 4  # first tokens that stay visible under the ring policy (arXiv:2309.17453)
STATE_BYTES = 256 << 20  # for kept states of recurrent layers
_MOST_CHECKPOINTS = 1024
RING_POSITIONS = 1 << 20  # where even a ring ends


class Beside(NamedTuple):
    """Memory of a second model that reads what the first one reads."""

    n_bytes: int
    per_token: int


class ContextTooLong(EdgeLLMError):
    """More context was asked for than fits into memory: ``n_affordable`` tokens do."""

    def __init__(self, message: str, n_affordable: int) -> None:
        super().__init__(message)
        self.n_affordable = n_affordable


@dataclass(frozen=True)
class Context:
    """``n_ctx`` tokens are visible at once, ``n_positions`` is where a sequence ends, ``n_blocks``
    the size of each cache pool. Under the ring policy ``window`` of the tokens are the newest."""

    n_ctx: int
    n_positions: int
    n_blocks: int
    window: int | None = None
    sinks: int = 0
    n_states: int = 0  # slots for the states of recurrent layers
    notices: list[str] = field(default_factory=list)


def _n_states(state: int, max_num_seqs: int) -> int:
    """Slots for recurrent states of so many bytes: what steps of all sequences need, and for
    states that are kept what STATE_BYTES hold, at least one for each sequence."""
    if not state:
        return 0
    kept = max(max_num_seqs, min(_MOST_CHECKPOINTS, STATE_BYTES // state))
    return STATE_SLOTS * max_num_seqs + kept


def _smaller(type_k: str, type_v: str) -> str:
    """What would make room for twice the context, as the end of a sentence."""
    is_wide = {"f32", "f16"} & {type_k, type_v}
    return ", or for keys and values in fewer bits (-ctk q8_0 -ctv q8_0)" if is_wide else ""


def fit_context(
    gguf: GGUF, config: Config, n_ctx: int | None, max_num_seqs: int, type_k: str, type_v: str,
    ring: bool, n_positions: int | None = None,
    cache_tokens: int | None = None, block: int = BLOCK, beside: Beside | None = None,
) -> Context:  # fmt: skip
    """``n_ctx`` None takes the model's context, or what fits into memory; EdgeLLMError says what
    would fit when more was asked for. ``n_positions``: there are no more (Graph.n_positions).
    ``cache_tokens`` is the room of all sequences together; None: n_ctx for each, or what fits.
    ``beside``: what a draft model needs."""
    trained, notices = config.n_ctx, []
    if n_positions is not None:
        if ring:
            raise EdgeLLMError(
                f"The model has learned {n_positions} positions and knows no others: "
                "context_policy ring cannot be used."
            )
        if n_ctx is not None and n_ctx > n_positions:
            notices.append(f"The context is {n_positions} tokens: the model has learned no more.")
            n_ctx = n_positions
    costs = bill(gguf, n_ctx or trained, type_k, type_v)
    beside = beside or Beside(0, 0)
    per_token = max(1, costs.kv_per_token + beside.per_token)
    state = costs.state // STATE_SLOTS
    n_states = _n_states(state, max_num_seqs)
    room = available_bytes() - costs.weights - costs.arena - state * n_states - beside.n_bytes
    affordable = max(0, int(room * 0.9)) // per_token // block * block
    if n_ctx is None:
        n_ctx = min(trained, max(affordable, block))
        if n_ctx < trained:
            notices.append(
                f"The context is {n_ctx} tokens instead of the model's {trained}: "
                "more would not fit into memory."
            )
    elif n_ctx > affordable:
        raise ContextTooLong(
            f"A context of {n_ctx} tokens needs {n_ctx * per_token / 1e9:.1f} GB for keys and "
            f"values, {affordable * per_token / 1e9:.1f} GB are left: ask for at most "
            f"{affordable} (-c){_smaller(type_k, type_v)}.",
            affordable,
        )
    elif n_ctx > trained:
        notices.append(f"The model was trained for {trained} tokens; answers may degrade beyond.")
    if not ring:
        n_tokens = min(n_ctx * max_num_seqs, max(affordable, n_ctx))
        if cache_tokens is not None:
            if cache_tokens > max(affordable, n_ctx):
                raise EdgeLLMError(
                    f"A cache of {cache_tokens} tokens does not fit into memory: ask for at most "
                    f"{affordable} (cache_tokens)."
                )
            n_tokens = cache_tokens
        return Context(n_ctx, n_ctx, -(-n_tokens // block), n_states=n_states, notices=notices)
    if cache_tokens is not None:
        raise EdgeLLMError("cache_tokens cannot be used with context_policy ring.")
    if n_ctx < SINKS + block:
        raise EdgeLLMError(
            f"context_policy ring needs a context of at least {SINKS + block} tokens (-c)."
        )
    # a window that moves also holds the step being computed, and blocks cut at its ends
    n_blocks = max_num_seqs * (-(-(n_ctx + STEP_TOKENS) // block) + 3)
    return Context(n_ctx, RING_POSITIONS, n_blocks, n_ctx - SINKS, SINKS, n_states, notices)
