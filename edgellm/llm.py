"""The whole machine on one page: a model file in, tokens and text out.

    llm = LLM("model.gguf")
    llm.generate("The capital of France is", SamplingParams(max_tokens=8)).text

One loop serves everything: ``schedule -> forward -> sample -> update``. Several prompts run
together; what a prompt answers does not depend on its company.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from types import TracebackType
from typing import Any, Self, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from edgellm.context import SINKS, fit_context
from edgellm.errors import EdgeLLMError
from edgellm.kernels.cpu import store, targets
from edgellm.kernels.cpu.cores import CpuMaskError, allowed_cpus, default_threads, parse_mask
from edgellm.kernels.cpu.hooks import HookFunction, inside_hook
from edgellm.kernels.cpu.inputs import Limits
from edgellm.kernels.cpu.program import ProgramError
from edgellm.kernels.cpu.team import MOST_THREADS, TeamError
from edgellm.kernels.cpu.user import UserSamplerError, compile_sampler
from edgellm.kernels.cpu.weights import linear_kernel
from edgellm.kernels.graph import MATRIX_OPS, Tensor
from edgellm.loading import compile_progress, tokenizer_in_background, weights_progress
from edgellm.memory import STEP_TOKENS
from edgellm.models import build_graph
from edgellm.overrides import Overrides
from edgellm.overrides import apply as apply_overrides
from edgellm.pooling import pool, pooling_of
from edgellm.quant.gguf import GGUF
from edgellm.runner import Run, Runner
from edgellm.sampling import Sampler, SamplingParams, log_softmax_top, resolve_bias
from edgellm.scheduler import Scheduler
from edgellm.sequence import Completion, Piece, Sequence, completion_of
from edgellm.structured import Grammars
from edgellm.tokenizer import Tokenizer

LOGITS_TOKENS = 64  # of a step whose logits are all wanted: rows of a big vocabulary are big
_kernels = store.KernelStore()  # machine code is shared by all models of the process


class ContextFull(EdgeLLMError):
    """A prompt does not fit into the context."""


class EngineError(EdgeLLMError):
    """The engine cannot be used: closed, forked, or in a state no call can repair."""


Prompt = str | list[int]


class LLM:
    """A model ready to run. ``close`` (or ``with``) frees everything.

    ``n_ctx`` is the limit of one sequence (None: the model's, as far as memory allows; see
    ``notices``), ``n_threads`` None takes the physical performance cores allowed to the process, or
    the CPUs of ``cpu_mask`` ("0x3": the first two), on which the threads then stay;
    at most ``max_num_seqs`` sequences run together, ``type_k`` and ``type_v`` are what keys and
    values are kept in: f32, f16, q8_0 or q4_0. At the end of the context ``context_policy`` "error"
    ends a sequence, "ring" goes on: a token sees the first ``SINKS`` tokens and the newest
    n_ctx - SINKS; ``max_positions`` is where a sequence ends.
    ``progress`` is told in words what loading is doing. ``samplers`` are functions (logits, tokens,
    position) that change the logits of every request before its own sampling, compiled by Numba.
    ``overrides`` go before what the file says (see Overrides).
    Raises ValueErrors whose message is one sentence for people.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        n_ctx: int | None = None,
        n_threads: int | None = None,
        cpu_mask: str | int | None = None,
        max_num_seqs: int = 8,
        type_k: str = "f16",
        type_v: str = "f16",
        context_policy: str = "error",
        samplers: Callable[..., None] | Iterable[Callable[..., None]] = (),
        progress: Callable[[str], None] | None = None,
        **overrides: Unpack[Overrides],
    ) -> None:
        _check_positive(n_ctx=n_ctx, n_threads=n_threads, max_num_seqs=max_num_seqs)
        if context_policy not in ("error", "ring"):
            raise EdgeLLMError(f"context_policy must be error or ring, not {context_policy!r}.")
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise EdgeLLMError(f"The path of a model file is needed, not {path!r}.")
        samplers = [samplers] if callable(samplers) else samplers
        self._ring = context_policy == "ring"
        self.type_k, self.type_v = type_k, type_v
        say = progress or (lambda text: None)
        self.notices: list[str] = []
        try:
            self._users = [compile_sampler(function) for function in samplers]
        except (UserSamplerError, targets.TargetError) as error:
            raise EdgeLLMError(str(error)) from None
        self._gguf = GGUF(path)
        self._runner: Runner | None = None
        try:
            apply_overrides(self._gguf, overrides)
            cpus = tuple(parse_mask(cpu_mask)) if cpu_mask is not None else ()
            self._load(n_ctx, n_threads, cpus, max_num_seqs, say)
        except (ProgramError, targets.TargetError, store.StoreError, CpuMaskError) as error:
            self._gguf.close()
            raise EdgeLLMError(str(error)) from None
        except TeamError as error:
            self._gguf.close()
            raise EdgeLLMError(f"{error} (-t).") from None
        except BaseException:
            self._gguf.close()
            raise

    def _load(
        self, n_ctx: int | None, n_threads: int | None, cpus: tuple[int, ...], max_num_seqs: int,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        gguf = self._gguf
        self.path = str(gguf.path)
        self.config, graph = build_graph(gguf)
        self.n_vocab = graph.n_vocab
        self._tokenizer = tokenizer_in_background(gguf)
        self.n_threads = n_threads or len(cpus) or default_threads()
        if self.n_threads > (n_cores := len(cpus or allowed_cpus())):
            cores = "one core" if n_cores == 1 else f"{n_cores} cores"
            self.notices.append(
                f"{self.n_threads} threads on {cores} stand in each other's way (-t)."
            )
        context = fit_context(
            gguf, self.config, n_ctx, max_num_seqs, self.type_k, self.type_v, self._ring,
            graph.n_positions,
        )  # fmt: skip
        self.n_ctx, self.max_positions = context.n_ctx, context.n_positions
        self.notices += context.notices
        if unused := self.config.weights.unused:
            names = ", ".join(unused[:3]) + (", …" if len(unused) > 3 else "")
            self.notices.append(f"{len(unused)} tensors of the file are not used: {names}.")
        # where every token sees the whole text, it is one step
        whole = 0 if graph.is_causal else context.n_ctx
        limits = Limits(
            n_threads=self.n_threads,
            max_tokens=max(STEP_TOKENS, max_num_seqs, whole),
            max_out=max(LOGITS_TOKENS, max_num_seqs, whole),
            max_seqs=max_num_seqs,
            n_ctx=context.n_positions,
            n_blocks=context.n_blocks,
            k_type=self.type_k,
            v_type=self.type_v,
            window=context.window,
            sinks=context.sinks,
            cpus=cpus,
        )
        before = _kernels.compiled, _kernels.loaded, _kernels.seconds
        _kernels.progress = compile_progress(say)
        self._graph = graph
        try:
            self._runner = Runner(gguf, graph, limits, _kernels, weights_progress(say))
        finally:
            _kernels.progress = None
        self.kernel_stats = {
            "compiled": _kernels.compiled - before[0],
            "loaded": _kernels.loaded - before[1],
            "seconds": _kernels.seconds - before[2],
        }
        self.max_num_seqs = max_num_seqs
        self._scheduler = Scheduler(
            self._runner.cache, limits.max_tokens, max_num_seqs, self.max_positions
        )
        self._lock = threading.RLock()  # callers' threads take turns; one step at a time
        self._last: Sequence | None = None

    # ---- text -------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer.result()

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self.tokenizer, self.n_vocab)

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self._gguf.metadata

    @property
    def chat_template(self) -> str | None:
        return self._gguf.string("tokenizer.chat_template", None)

    def tokenize(
        self, text: str, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Token ids; ``add_special`` adds what the model wants around a text, ``parse_special``
        takes the text's special tokens as such instead of as plain text."""
        return self.tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)

    # ---- generation -------------------------------------------------------------------------

    @overload
    def generate(self, prompts: Prompt, params: SamplingParams | None = None) -> Completion: ...
    @overload
    def generate(
        self, prompts: list[Prompt], params: SamplingParams | None = None
    ) -> list[Completion]: ...
    @overload
    def generate(
        self, prompts: list[str], params: SamplingParams | None = None
    ) -> list[Completion]: ...
    @overload
    def generate(
        self, prompts: list[list[int]], params: SamplingParams | None = None
    ) -> list[Completion]: ...
    def generate(self, prompts: Any, params: SamplingParams | None = None) -> Any:
        """Complete a prompt (text or token ids), or a list of them together in order."""
        if not isinstance(prompts, str | list | tuple | np.ndarray):
            raise EdgeLLMError("A prompt is a text, a list of token ids, or a list of those.")
        one = isinstance(prompts, str) or (len(prompts) > 0 and _is_tokens(prompts))
        sequences: list[Sequence] = []
        params = params or SamplingParams()
        try:
            several: Any = [prompts] if one else prompts
            for prompt in several:
                sequences.append(self._sequence(prompt, params))
            for sequence in sequences:
                self._add(sequence)
            while any(s.finish_reason is None for s in sequences):
                self.step()
        finally:
            for sequence in sequences:
                self.forget(sequence)
        for sequence in sequences:
            sequence.raise_error()
        completions = [completion_of(s) for s in sequences]
        return completions[0] if one else completions

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Piece]:
        """The completion piece by piece, computed as pieces are taken; leaving the loop early frees
        the sequence."""
        return self._stream(self._sequence(prompt, params or SamplingParams()))

    def _stream(self, sequence: Sequence) -> Iterator[Piece]:
        try:
            self._add(sequence)
            while sequence.pieces or sequence.finish_reason is None:
                if not sequence.pieces:
                    self.step()
                while sequence.pieces:
                    yield sequence.pieces.popleft()
            sequence.raise_error()
        finally:
            self.forget(sequence)

    def logits(self, token_ids: list[int]) -> NDArray[np.float32]:
        """float32 [n_tokens, n_vocab]: a fresh sequence from position 0, the logits after each."""
        self._check_generates()
        sequence = self._sequence(token_ids, SamplingParams(max_tokens=1, temperature=0))
        out = np.empty((len(sequence.tokens), self.n_vocab), np.float32)
        with self._turn():
            runner = self._ready()
            if not runner.cache.admit(sequence, len(sequence.tokens), reuse=False):
                raise EngineError("No room for another sequence; finish or close open streams.")
            try:
                for start in range(0, len(out), LOGITS_TOKENS):
                    n = min(LOGITS_TOKENS, len(out) - start)
                    out[start : start + n] = self._forward([Run(sequence, n, "all")])
            finally:
                runner.cache.release(sequence)
        return out

    def embed(self, prompts: Any) -> NDArray[np.float32]:
        """What an encoder makes of a text (or token ids): float32 [n_embd] of length 1, or
        [n, n_embd] of a list of them."""
        if self._graph.is_causal:
            raise EdgeLLMError(
                f"A model of the architecture {self.config.architecture} generates text; "
                "embeddings need an encoder, such as bert or nomic-bert."
            )
        if isinstance(prompts, str) or (len(prompts) > 0 and _is_tokens(prompts)):
            vector: NDArray[np.float32] = self.embed([prompts])[0]
            return vector
        kind, vectors = pooling_of(self.config), []
        for prompt in prompts:
            sequence = self._sequence(prompt, SamplingParams(max_tokens=1))
            with self._turn():
                cache = self._ready().cache
                if not cache.admit(sequence, len(sequence.tokens), reuse=False):
                    raise EngineError("No room for another sequence.")
                try:
                    rows = self._forward([Run(sequence, len(sequence.tokens), "all")])
                    vectors.append(pool(rows, kind))
                finally:
                    cache.release(sequence)
        return np.array(vectors, np.float32).reshape(len(vectors), self.config.n_embd)

    def on(self, name: str, function: HookFunction) -> Callable[[], None]:
        """Call ``function`` in every step with a layer's output, float32 [n_tokens, dim]: it may
        change the rows in place or return others. ``name`` is "blk.3.resid" (the residual stream
        behind layer 3), "blk.3.attn_q" and so on (what a matrix puts out) or "output".

        Returns a function that removes the hook. An exception in ``function`` ends the step and
        reaches the caller of generate, stream or logits.
        """
        if not callable(function):
            raise EdgeLLMError(f"A hook must be a function, not {function!r}.")
        tensor = self._tensor(name)
        with self._turn():
            program = self._ready().program
            hook = program.add_hook(tensor, function)
            self._reuse_unless_hooked()

        def remove() -> None:
            hook.is_active = False
            if inside_hook():  # its stage stays, without effect, until hooks change again
                return
            with self._turn():
                if self._runner is not None:
                    program.remove_hook(tensor, hook)
                    self._reuse_unless_hooked()

        return remove

    def _reuse_unless_hooked(self) -> None:
        """A hook has to see every token, and what it changed must not outlive it."""
        runner = self._ready()
        runner.cache.drop_parked()
        self._scheduler.reuse = not runner.program.hooks

    def _tensor(self, name: str) -> Tensor:
        """The tensor a hook names; EdgeLLMError lists what there is."""
        named = {}
        for op in self._graph.ops:
            if op.kind in MATRIX_OPS:
                named[op.weights["weight"].name.removesuffix(".weight")] = op.output
            if op.layer is not None:
                named[f"blk.{op.layer}.resid"] = op.output  # the layer's last op stays
        named["output"] = self._graph.output
        if name not in named:
            parts = sorted({re.sub(r"^blk\.\d+\.", "blk.N.", n) for n in named})
            raise EdgeLLMError(
                f"No tensor {name!r} to hook; this model has {', '.join(parts)} for layers "
                f"N = 0 to {self.config.n_layers - 1}."
            )
        return named[name]

    # ---- the loop ---------------------------------------------------------------------------

    def step(self) -> None:
        """Compute one step for whoever is waiting; finished text is put on the sequences."""
        with self._turn():
            self._ready()
            batch = self._scheduler.schedule()
            if not batch:
                return
            now = time.perf_counter()
            runs = []
            for sequence, n in batch:
                sequence.started = sequence.started or now
                reaches_end = n == sequence.n_waiting
                runs.append(Run(sequence, n, "last" if reaches_end else "none"))
            rows = iter(self._forward(runs))
            for run in runs:
                if run.wanted == "last":
                    self._update(run.sequence, next(rows))

    def _forward(self, runs: list[Run]) -> NDArray[np.float32]:
        try:
            return self._ready().forward(runs)
        except TeamError as error:
            raise EngineError(f"{error}.") from None

    def _update(self, sequence: Sequence, logits: NDArray[np.float32]) -> None:
        """Sample the sequence's next token and decide whether it was the last."""
        params, tokenizer = sequence.params, self.tokenizer
        try:
            token = sequence.sampler.draw(logits, sequence.tokens)
            is_complete = sequence.sampler.accept(token)
        except Exception as error:  # also of a user's function; the others' step goes on
            sequence.error = error
            self._finish(sequence, "error")
            return
        now = time.perf_counter()
        sequence.first_token = sequence.first_token or now
        if token in tokenizer.eog and (params.structured or not params.ignore_eos):
            self._finish(sequence, "stop")
            return
        sequence.tokens.append(token)
        text, hit = sequence.stops.push(sequence.decoder.push(token))
        logprob, top = None, ()
        if params.logprobs:
            logprob, best = log_softmax_top(logits, token, params.logprobs)
            top = tuple(best)  # type: ignore[assignment]
        sequence.pieces.append(Piece(text, token, None, logprob, top))
        n_output = len(sequence.tokens) - sequence.n_prompt
        if hit is not None or is_complete:
            self._finish(sequence, "stop")
        elif params.max_tokens is not None and n_output >= params.max_tokens:
            self._finish(sequence, "length")
        elif len(sequence.tokens) >= self.max_positions:
            sequence.context_full = True
            self._finish(sequence, "length")

    def _finish(self, sequence: Sequence, reason: str) -> None:
        sequence.finished = time.perf_counter()
        sequence.finish_reason = reason
        text, _ = sequence.stops.push(sequence.decoder.flush())
        text += sequence.stops.flush()
        sequence.pieces.append(Piece(text, None, reason))
        self._last = sequence
        self._scheduler.remove(sequence)

    # ---- state ------------------------------------------------------------------------------

    @property
    def timings(self) -> dict[str, float]:
        """Of the request that finished last, in llama.cpp's names."""
        return self._last.timings() if self._last is not None else {}

    @property
    def context_full(self) -> bool:
        """Whether the request that finished last was ended by the end of its context."""
        return self._last is not None and self._last.context_full

    @property
    def n_dropped(self) -> int:
        """Tokens of the request that finished last that its end no longer saw (policy ring)."""
        return max(0, len(self._last.tokens) - self.n_ctx) if self._last and self._ring else 0

    @property
    def is_idle(self) -> bool:
        """Nothing waits or runs, and every cache block is free."""
        return not (self._scheduler.waiting or self._scheduler.running) and (
            self._ready().cache.idle
        )

    @property
    def runner(self) -> Runner:
        """What computes steps: for measurements while no request runs (see edgellm.steps)."""
        return self._ready()

    def report(self) -> list[dict[str, Any]]:
        """The kernel of every matrix: tensor, type, shape, kernel, packed."""
        rows = []
        for op in self._graph.ops:
            if op.kind in MATRIX_OPS:
                weight = op.weights["weight"]
                kernel = linear_kernel(weight.type, targets.current(), weight.precise)
                rows.append(
                    {"tensor": weight.name, "type": weight.type.name, "shape": weight.shape,
                     "kernel": kernel.name, "packed": kernel.is_packed}
                )  # fmt: skip
        return rows

    def close(self) -> None:
        """Stop the threads and free weights and cache; the object cannot be used afterwards."""
        if self._runner is not None and not inside_hook():
            self._runner.program.team.abort()  # a step of another thread ends early
        with self._turn():
            runner, self._runner = self._runner, None
            if runner is not None:
                runner.close()
            self._gguf.close()

    def __reduce__(self) -> str:
        raise EngineError("A model cannot be copied or pickled; load the file where it is needed.")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Callers' threads take turns: one step at a time."""
        if inside_hook():
            raise EngineError("A hook cannot use a model: the step it belongs to is still running.")
        with self._lock:
            yield

    def _ready(self) -> Runner:
        if self._runner is None:
            raise EngineError("This model is closed.")
        return self._runner

    def _sequence(self, prompt: Prompt, params: SamplingParams) -> Sequence:
        self._ready()
        if not isinstance(params, SamplingParams):
            raise EdgeLLMError(f"params must be SamplingParams, not {type(params).__name__}.")
        if isinstance(prompt, str):
            tokens = self.tokenize(prompt)
        elif _is_tokens(prompt):
            tokens = [int(t) for t in prompt]
        else:
            raise EdgeLLMError("A prompt is a text or a list of token ids.")
        if not tokens:
            raise EdgeLLMError("The prompt is empty: it needs at least one token.")
        if bad := [t for t in tokens if not 0 <= t < self.n_vocab]:
            raise EdgeLLMError(
                f"Token id {bad[0]} is not in the vocabulary of {self.n_vocab} tokens."
            )
        if len(tokens) > self.max_positions:
            raise ContextFull(
                f"The prompt has {len(tokens)} tokens and the context {self.max_positions}: "
                "shorten it or ask for a larger context (-c)."
            )
        sequence = Sequence(tokens, params, self.tokenizer.stream())
        sequence.sampler = Sampler(
            params,
            sequence.seed,
            bias=resolve_bias(params, self.tokenizer, self.n_vocab),
            users=self._users,
            matcher=self._grammars.matcher(params) if params.structured else None,
            piece=self.tokenizer.piece if self.tokenizer.has_text else None,
        )
        return sequence

    def submit(self, prompt: Prompt, params: SamplingParams) -> Sequence:
        """Queue a request: ``step`` until it has a ``finish_reason``, or ``forget`` it."""
        sequence = self._sequence(prompt, params)
        self._add(sequence)
        return sequence

    def _check_generates(self) -> None:
        if not self._graph.is_causal:
            raise EdgeLLMError(
                f"A model of the architecture {self.config.architecture} makes embeddings, not "
                "text: use LLM.embed."
            )

    def _add(self, sequence: Sequence) -> None:
        self._check_generates()
        if not self._ready().cache.fits(self._scheduler.most_tokens(sequence)):
            raise ContextFull("The request can never fit into the key-value cache (-c).")
        with self._turn():
            self._scheduler.add(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Free what a request holds, finished or not."""
        if self._runner is not None:
            with self._turn():
                self._scheduler.remove(sequence)


def _is_tokens(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple | np.ndarray) and all(
        isinstance(t, int | np.integer) and not isinstance(t, bool) for t in prompt
    )


def _check_positive(**values: int | None) -> None:
    for name, value in values.items():
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if value is not None and (not whole or value < 1):
            raise EdgeLLMError(f"{name} must be a whole number of at least 1, not {value!r}.")
    if (n := values.get("n_threads")) is not None and n > MOST_THREADS:
        raise EdgeLLMError(f"n_threads is {n}; at most {MOST_THREADS} threads work together (-t).")


__all__ = ["LLM", "SINKS", "Completion", "ContextFull", "EngineError"]
