"""What a model will take of the memory, reckoned from its graph without loading anything."""

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from edgellm.cache_types import check_cache_types
from edgellm.kernels.graph import Op
from edgellm.models import build_graph
from edgellm.quant import by_name
from edgellm.quant.gguf import GGUF

STEP_TOKENS = 256  # tokens of one prefill step, for which the activations are laid out
STATE_SLOTS = 2  # of each sequence: what a step began with stays until it is done
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Bill:
    """Bytes. The arena is an estimate, the rest follows from the file."""

    n_ctx: int
    weights: int
    kv_per_token: int  # of a sequence that no window has cut yet
    kv: int  # of one sequence that fills the context
    arena: int
    type_k: str  # number formats of keys and values
    type_v: str
    state: int  # of one sequence in recurrent layers, however long it is

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.arena + self.state


def bill(model: GGUF, n_ctx: int | None = None, type_k: str = "f16", type_v: str = "f16") -> Bill:
    """GGUFError for a file whose architecture cannot be run, EdgeLLMError for types that its heads
    cannot be kept in."""
    config, graph = build_graph(model)
    check_cache_types(config, graph, type_k, type_v)
    n_ctx = n_ctx or config.n_ctx
    per_token = kv = state = 0
    widths: Counter[int | None] = Counter()
    for op in graph.ops:
        if op.output.rows == "tokens":
            widths[op.layer] += op.output.dim
        state += STATE_SLOTS * 4 * op.n_state
        if op.kind == "attention":
            row = kv_row_bytes(op, type_k, type_v)
            window = op.attrs["window"]
            # A window's ring also takes the step that is being written.
            kept = n_ctx if window is None else min(n_ctx, window + STEP_TOKENS)
            per_token += row
            kv += row * kept
    # Layers take turns in the same place, so the widest one counts.
    return Bill(
        n_ctx=n_ctx,
        weights=sum(tensor.n_bytes for tensor in model.tensors.values()),
        kv_per_token=per_token,
        kv=kv,
        type_k=type_k,
        type_v=type_v,
        arena=4 * (STEP_TOKENS * max(widths.values()) + graph.output.dim),
        state=state,
    )


def kv_row_bytes(op: Op, type_k: str, type_v: str) -> int:
    """Bytes of one token's keys and values in an attention op's cache."""
    n, a = op.attrs["n_kv_heads"], op.attrs
    keys, values = by_name(type_k), by_name(type_v)
    return keys.row_bytes(n * a["head_dim"]) + values.row_bytes(n * a["v_dim"])


def available_bytes() -> int:
    """Memory that this process may still take: the machine's, within its cgroup's limit."""
    import psutil

    free = int(psutil.virtual_memory().available)
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        return min(free, limit - used)
    except (OSError, ValueError):  # no cgroup, or "max"
        return free


def resident_bytes() -> int:
    """Memory that this process occupies now."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """The most memory that this process has occupied so far."""
    if sys.platform == "linux":
        # ru_maxrss of a new program begins with what the process had that started it
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
