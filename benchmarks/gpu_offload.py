"""gpu_check's model through the engine, with all, half and none of its layers on the GPU.

What the kernels reach alone is in gpu_check; here are the real program, planner and CPU kernels,
and so their dependencies. The model is in no file: weights are made as they are read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from gpu_model import FREQ_BASE, Sizes, matrices_of_layer, random_blocks, type_of
from numpy.typing import NDArray

from edgellm.forecast import Forecast
from edgellm.kernels.cpu.cores import default_threads
from edgellm.kernels.cpu.inputs import Limits
from edgellm.kernels.cpu.kv_types import BLOCK
from edgellm.kernels.cpu.peaks import Peaks
from edgellm.kernels.cpu.store import KernelStore
from edgellm.kernels.cuda.device import Device, OutOfDeviceMemory
from edgellm.memory import STEP_TOKENS, available_bytes
from edgellm.models import build_graph
from edgellm.offload import CPU, Options, Room
from edgellm.offload_sizes import device_sizes, fitted_plan
from edgellm.quant import by_name
from edgellm.quant.gguf import GGUF, TensorInfo
from edgellm.runner import Offload, Run, Runner
from edgellm.sampling import SamplingParams
from edgellm.sequence import Sequence
from edgellm.speeds import Speed, Speeds

GPU = "cuda0"
LONGEST = 15.0  # seconds that a prompt or an answer may take: what a slow CPU cannot do is cut
PLACEMENT = 75.0  # seconds that one takes at most: loading, two prompts and an answer
CHUNK = 64  # tokens, from whose time that of a prompt is foretold
ROOM = 4 << 30  # bytes of the CPU's memory beside weights: what the bandwidth is measured on
PATTERN = 65521  # blocks before a matrix repeats itself: a prime, so that as many rows differ

Report = Callable[..., None]


class RandomModel(GGUF):
    """A llama in Q4_K_M of random weights, in no file."""

    def __init__(self, s: Sizes) -> None:
        self.path, self.parts, self.entries = "random weights", [], {}
        self.metadata = {"general.architecture": "llama"} | {
            f"llama.{key}": value
            for key, value in {
                "block_count": s.n_layers, "embedding_length": s.n_embd,
                "feed_forward_length": s.n_ff, "context_length": s.n_ctx,
                "attention.head_count": s.n_heads, "attention.head_count_kv": s.n_kv_heads,
                "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": FREQ_BASE,
            }.items()
        }  # fmt: skip
        self.tensors = {}
        self._add("token_embd", "q4_k", s.n_embd, s.n_vocab)
        for i in range(s.n_layers):
            for name, shape in matrices_of_layer(s).items():
                of = "ffn" if name in ("gate", "up", "down") else "attn"
                full = f"{of}_{'output' if name == 'o' else name}"
                self._add(f"blk.{i}.{full}", type_of(name, i), *shape)
            self._add(f"blk.{i}.attn_norm", "f32", s.n_embd)
            self._add(f"blk.{i}.ffn_norm", "f32", s.n_embd)
        self._add("output_norm", "f32", s.n_embd)
        self._add("output", "q6_k", s.n_embd, s.n_vocab)
        rng = np.random.default_rng(0)
        self._patterns = {
            (info.type.name, info.shape[0]): np.empty(0, np.uint8) for info in self.tensors.values()
        }
        for kind, n_in in self._patterns:  # before threads read them
            made = np.ones(n_in, "<f4") if kind == "f32" else random_blocks(
                rng, kind, n_in, PATTERN
            )  # fmt: skip
            self._patterns[kind, n_in] = made.reshape(-1).view(np.uint8)

    def _add(self, name: str, kind: str, *shape: int) -> None:
        full = f"{name}.weight"
        self.tensors[full] = TensorInfo(full, shape, by_name(kind), 0, 0)

    def read_into(self, info: TensorInfo, start_byte: int, out: Any) -> None:
        """The pattern of the tensor's type, over and over."""
        pattern = self._patterns[info.type.name, info.shape[0]]
        at, done = start_byte % len(pattern), 0
        while done < len(out):
            n = min(len(out) - done, len(pattern) - at)
            out[done : done + n] = pattern[at : at + n]
            done, at = done + n, 0


class Offloaded:
    """The model with some of its layers on the GPU."""

    def __init__(self, model: RandomModel, s: Sizes, device: Device, n_gpu_layers: int) -> None:
        """MemoryError where the CPU has no room for its share."""
        _, self.graph = build_graph(model)
        self.sizes, self.device = s, device
        self.limits = Limits(
            n_threads=default_threads(), max_tokens=STEP_TOKENS, max_out=1, max_seqs=1,
            n_ctx=s.n_ctx, n_blocks=-(-s.n_ctx // BLOCK),
        )  # fmt: skip
        rooms = [Room(GPU, *device.memory())]

        sizes = device_sizes(self.graph, s.n_layers, self.limits)
        options = Options(n_gpu_layers, stream="off")
        self.plan = fitted_plan(self.graph, sizes, self.limits, rooms, options)
        whole = sum(info.n_bytes for info in model.tensors.values())
        needed = ROOM + whole - sum(taken.weights for taken in self.plan.taken.values())
        free = available_bytes()
        if needed > free:
            raise MemoryError(f"{needed / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free")
        self._store, self._open = KernelStore(), None
        offload = Offload(self.plan, {GPU: device}) if self.plan.uses_device else None
        self.runner = Runner(model, self.graph, self.limits, self._store, offload=offload)

    def open(self, n_prompt: int) -> Sequence:
        """A sequence in the place of the one before."""
        if self._open is not None:
            self.runner.cache.release(self._open)
        tokens = [(7919 * i + 13) % self.sizes.n_vocab for i in range(n_prompt)]
        nobody: Any = None  # text is not asked for
        self._open = Sequence(tokens, SamplingParams(max_tokens=1, temperature=0), nobody)
        assert self.runner.cache.admit(self._open, reuse=False)
        return self._open

    def prefill(self, sequence: Sequence) -> NDArray[np.float32]:
        """Compute the prompt, in steps as the engine's; the logits behind it."""
        while (left := sequence.n_waiting) > STEP_TOKENS:
            self.runner.forward([Run(sequence, STEP_TOKENS, "none")])
        logits = self.runner.forward([Run(sequence, left, "last")])[0].copy()
        if not np.isfinite(logits).all():
            raise ArithmeticError("logits are not finite")
        return logits

    def decode(self, sequence: Sequence, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """One step with the best token; the logits behind it."""
        sequence.tokens.append(int(logits.argmax()))
        return self.runner.forward([Run(sequence, 1, "last")])[0]

    def least_seconds(self, bandwidth: float, depth: int) -> float:
        """Of a generated token: what reading the memories takes, one after the other."""
        peaks = Peaks(self.runner.program.team, self._store)
        read = max(peaks.read() for _ in range(5))
        speeds = Speeds({CPU: Speed(read, 1.0), GPU: Speed(bandwidth, 1.0)})
        kinds = self.limits.k_type, self.limits.v_type
        return Forecast(self.graph, self.plan, *kinds, speeds).step_seconds(1, depth)

    def close(self) -> None:
        self.runner.close()


def offload_rows(
    report: Report, device: Device, s: Sizes, bandwidth: float, seconds_left: Callable[[], float]
) -> None:
    """Rows for each placement; ``off`` is how far logits are from those of the first, of the
    largest."""
    model, first = RandomModel(s), None
    for n in (s.n_layers + 1, s.n_layers // 2, 0):
        if seconds_left() < PLACEMENT:
            report(f"ngl {n}", skipped="no time is left")
            continue
        try:
            at = Offloaded(model, s, device, n)
        except (MemoryError, OutOfDeviceMemory) as error:
            report(f"ngl {n}", skipped=str(error))
            continue
        try:
            logits = _rows(at, report, bandwidth, first)
        finally:
            at.close()
        first = logits if first is None else first


def _rows(
    at: Offloaded, report: Report, bandwidth: float, first: NDArray[np.float32] | None
) -> NDArray[np.float32]:
    """Returns the logits behind a chunk, which every placement computes."""
    s, name = at.sizes, f"ngl {at.plan.n_gpu_layers}"
    a_chunk = n = min(CHUNK, s.n_prompt)
    _prompt(at, n)  # compiles, and touches memory for the first time
    a_token, sequence, chunk = _prompt(at, n)
    off = {} if first is None else {"off": float(np.abs(chunk - first).max() / np.abs(first).max())}
    n = s.n_prompt
    while n > a_chunk and n * a_token > LONGEST:
        n //= 2
    begun = time.perf_counter()
    a_token, sequence, logits = _prompt(at, n)
    for _ in range(2):
        if time.perf_counter() - begun < LONGEST / 2:
            again, sequence, logits = _prompt(at, n)
            a_token = min(a_token, again)
    report(f"{name} pp{n}", tok_s=1 / a_token, **off)

    for _ in range(2):  # the second is captured
        logits = at.decode(sequence, logits)
    depth, done, begun = sequence.n_computed, 0, time.perf_counter()
    while done < s.n_generated and time.perf_counter() - begun < LONGEST:
        logits = at.decode(sequence, logits)
        done += 1
    a_token = (time.perf_counter() - begun) / done
    share = at.least_seconds(bandwidth, depth + done // 2) / a_token
    report(f"{name} tg{done}", tok_s=1 / a_token, **{"%": 100 * share})
    return chunk


def _prompt(at: Offloaded, n: int) -> tuple[float, Sequence, NDArray[np.float32]]:
    """Seconds a token of a prompt of n, its sequence, and the logits behind it."""
    sequence = at.open(n)
    started = time.perf_counter()
    logits = at.prefill(sequence)
    return (time.perf_counter() - started) / n, sequence, logits
