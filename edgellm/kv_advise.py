"""What each type of keys and values costs and saves, measured on a text of the user's.

The text's second half is computed behind its first with every pair of types, and the distributions
of the next token are compared with those of float32. The weights are loaded once: a program keeps
caches of every pair side by side, so that pairs take turns, and a noisy machine is noisy for all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.cache_types import check_cache_types
from edgellm.errors import EdgeLLMError
from edgellm.kernels.graph import Graph
from edgellm.llm import LLM
from edgellm.memory import STEP_TOKENS, kv_row_bytes
from edgellm.quant.gguf import GGUF

Pair = tuple[str, str]  # types of keys and values
EXACT: Pair = ("f32", "f32")
PAIRS: tuple[Pair, ...] = (
    EXACT, ("f16", "f16"), ("q8_0", "q8_0"), ("q8_0", "q4_0"), ("q4_0", "q8_0"), ("q4_0", "q4_0"),
)  # fmt: skip
FEWEST = 64  # tokens of a text that says something
MOST_KL = 0.01  # mean divergence up to which a cache is recommended
_COMPARED = 64  # positions whose distributions are held at once
_ROUNDS, _DECODED = 5, 5  # of timing; steps of a pair in each, after one that warms up


@dataclass
class Result:
    """What a pair of types came to. KL in nats, of float32's distribution from the pair's."""

    type_k: str
    type_v: str
    bytes_per_token: int
    kl: list[float] = field(default_factory=list)  # of each position
    same_top: list[bool] = field(default_factory=list)  # whether the likeliest token is the same
    seconds: list[float] = field(default_factory=list)  # of single tokens behind the text

    def row(self) -> dict[str, Any]:
        return {
            "type_k": self.type_k,
            "type_v": self.type_v,
            "bytes_per_token": self.bytes_per_token,
            "kl_mean": statistics.fmean(self.kl),
            "kl_99": float(np.quantile(self.kl, 0.99)),
            "same_top": statistics.fmean(self.same_top),
            "tokens_per_second": 1 / statistics.median(self.seconds),
        }


class Readers:
    """One text in a model's caches, once for each pair of types; ``use`` says for which. The model
    serves nobody meanwhile."""

    def __init__(self, llm: LLM, tokens: list[int], pairs: list[Pair]) -> None:
        self._program, self._pairs = llm.runner.program, pairs
        self._turns = dict.fromkeys(range(len(pairs)), 0)  # which state of a seat is newest
        with GGUF(llm.path) as file:
            table = file.tensors[self._program.embedding.name]
            self._rows = np.empty((len(tokens), table.row_bytes), np.uint8)
            for i, token in enumerate(tokens):
                file.read_into(table, token * table.row_bytes, self._rows[i])

    def use(self, pair: Pair) -> None:
        self._seat = self._pairs.index(pair)  # of block tables and recurrent states
        self._groups = self._program.keep_in(*pair)
        for group in self._groups:  # blocks behind each other; where a window moves, in turns
            places = group.table.shape[1]
            group.table[self._seat] = np.arange(places) % group.n_blocks
        for table in self._program.tables.values():
            table.fill(len(self._rows))

    def compute(self, first: int, n: int, n_out: int) -> NDArray[np.float32]:
        """Tokens first .. first + n - 1; logits [n_out, n_vocab] of the last, valid until the next
        call. Can be repeated from a position on, except in recurrent layers."""
        inputs, positions = self._program.inputs, np.arange(first, first + n)
        inputs.embeddings[:n] = self._rows[first : first + n]
        inputs.positions[:n], inputs.last_positions[:n] = positions, first + n - 1
        inputs.out_rows[:n_out] = np.arange(n - n_out, n)
        # a state is read from the slot that the step before wrote, and written to the other
        slot = 2 * self._seat + self._turns[self._seat]
        self._turns[self._seat] ^= 1
        inputs.runs[0] = 0, n, slot if first else -1, slot ^ 1
        inputs.n_runs[0] = 1
        for group in self._groups:
            block = group.shape.block
            blocks = group.table[self._seat, positions // block].astype(np.int64)
            group.slots[:n] = blocks * block + positions % block
            group.plan([(0, n, first, self._seat)])
        self._program.run(n, n_out)
        return self._program.logits[:n_out]


def usable_pairs(llm: LLM, graph: Graph) -> tuple[list[Pair], str]:
    """The pairs that the model's heads can be kept in, and why others cannot, or ""."""
    found, why = [], ""
    for pair in PAIRS:
        try:
            check_cache_types(llm.config, graph, *pair)
            found.append(pair)
        except EdgeLLMError as error:
            why = str(error)
    return found, why


def compare(
    llm: LLM, tokens: list[int], say: Callable[[str], None] = lambda text: None
) -> list[Result]:
    """Every usable pair over the second half of a text, the exact one first. ``llm`` has as many
    seats as there are PAIRS."""
    graph = llm.runner.program.graph
    pairs, _ = usable_pairs(llm, graph)
    attention = [op for op in graph.ops if op.kind == "attention"]
    results = {p: Result(*p, sum(kv_row_bytes(op, *p) for op in attention)) for p in pairs}
    readers, half = Readers(llm, tokens, pairs), len(tokens) // 2
    for pair in pairs:
        readers.use(pair)
        for start in range(0, half, STEP_TOKENS):
            say(f"keys {pair[0]}, values {pair[1]}: {start} of {half} tokens")
            readers.compute(start, min(STEP_TOKENS, half - start), 0)
    for start in range(half, len(tokens), _COMPARED):
        say(f"comparing: {start} of {len(tokens)} tokens")
        n = min(_COMPARED, len(tokens) - start)
        exact = np.empty(0, np.float32)
        for pair in pairs:
            readers.use(pair)
            found = log_softmax(readers.compute(start, n, n))
            exact = found if pair == EXACT else exact
            results[pair].kl += divergence(exact, found).tolist()
            results[pair].same_top += (exact.argmax(1) == found.argmax(1)).tolist()
    last = len(tokens) - 1
    for i in range(_ROUNDS):
        for pair in pairs:
            say(f"speed of single tokens: {i + 1} of {_ROUNDS}")
            readers.use(pair)
            readers.compute(last, 1, 1)
            for _ in range(_DECODED):
                begun = time.perf_counter()
                readers.compute(last, 1, 1)
                results[pair].seconds.append(time.perf_counter() - begun)
    return list(results.values())


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    shifted = logits - logits.max(axis=1, keepdims=True)
    total = np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)
    found: NDArray[np.float32] = shifted - np.log(total).astype(np.float32)
    return found


def divergence(p: NDArray[np.float32], q: NDArray[np.float32]) -> NDArray[np.float64]:
    """KL(p || q) in nats of each row of log-probabilities; never below 0."""
    share = np.exp(p)
    apart = np.where(share > 0, p - q, 0)  # what p excludes does not count
    found: NDArray[np.float64] = np.sum(share * apart, axis=1, dtype=np.float64)
    return np.maximum(found, 0)


def recommend(rows: list[dict[str, Any]], most_kl: float = MOST_KL) -> tuple[dict[str, Any], str]:
    """The smallest cache whose mean divergence is at most ``most_kl``, and the reason in words."""
    good = [row for row in rows if row["kl_mean"] <= most_kl]
    best = min(good or rows[:1], key=lambda row: (row["bytes_per_token"], row["kl_mean"]))
    widest = max(row["bytes_per_token"] for row in rows if row["type_k"] == "f16")
    share = 100 * best["bytes_per_token"] / widest
    if not good:
        return best, f"no other cache keeps the mean KL within {most_kl:g}"
    return best, (
        f"the smallest cache whose mean KL is at most {most_kl:g} ({best['kl_mean']:.2g}); "
        f"{share:.0f} % of f16's bytes"
    )


def advise(
    path: str, text: str, n_tokens: int, most_kl: float = MOST_KL, n_threads: int | None = None,
    cpu_mask: str | None = None, say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:  # fmt: skip
    """Load a model and compare the types on the text's first ``n_tokens``: ``rows``, one for each
    pair, ``recommended`` and ``reason``. EdgeLLMError for a text that is too short."""
    with LLM(
        path, n_ctx=n_tokens, max_num_seqs=len(PAIRS), n_threads=n_threads, cpu_mask=cpu_mask,
        progress=say, n_gpu_layers=0,
    ) as llm:  # fmt: skip
        graph = llm.runner.program.graph
        if not graph.is_causal:
            raise EdgeLLMError(
                f"A model of the architecture {llm.config.architecture} keeps no cache: each text "
                "is one step."
            )
        tokens = llm.tokenize(text)[: llm.n_ctx]
        if len(tokens) < FEWEST:
            raise EdgeLLMError(
                f"The text has {len(tokens)} tokens, too few to compare anything: at least "
                f"{FEWEST} are needed, better {8 * FEWEST} (-f)."
            )
        rows = [result.row() for result in compare(llm, tokens, say)]
        best, reason = recommend(rows, most_kl)
        return {
            "model": path,
            "n_tokens": len(tokens),
            "n_compared": len(tokens) - len(tokens) // 2,
            "rows": rows,
            "recommended": {"type_k": best["type_k"], "type_v": best["type_v"]},
            "reason": reason,
            "left_out": usable_pairs(llm, graph)[1],
        }
