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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from edgellm import kv_file, kv_session, placement
from edgellm.cache_report import CacheReport
from edgellm.context import SINKS, fit_context
from edgellm.cost import step_cost
from edgellm.errors import EdgeLLMError
from edgellm.host_tier import HostTier
from edgellm.kernels.cpu import store, targets
from edgellm.kernels.cpu.cores import CpuMaskError, allowed_cpus, default_threads, parse_mask
from edgellm.kernels.cpu.hooks import HookFunction, inside_hook
from edgellm.kernels.cpu.inputs import Limits
from edgellm.kernels.cpu.kv_types import BLOCK, BLOCKS
from edgellm.kernels.cpu.program import ProgramError
from edgellm.kernels.cpu.team import MOST_THREADS, TeamError
from edgellm.kernels.cpu.user import UserSamplerError, compile_sampler
from edgellm.kernels.cpu.weights import linear_kernel
from edgellm.kernels.graph import MATRIX_OPS, Tensor
from edgellm.loading import compile_progress, tokenizer_in_background, weights_progress
from edgellm.loop import EngineError, Loop, Seat
from edgellm.lora import Given, attach
from edgellm.memory import STEP_TOKENS
from edgellm.metrics import Metrics
from edgellm.models import build_graph
from edgellm.offload import CPU, Options
from edgellm.overrides import Overrides
from edgellm.overrides import apply as apply_overrides
from edgellm.placement_report import placement_report
from edgellm.pooling import pool, pooling_of
from edgellm.prompts import ContextFull, Prompt, Prompts, check_positive, is_tokens
from edgellm.quant.gguf import GGUF
from edgellm.request_options import RequestOptions
from edgellm.runner import Run, Runner
from edgellm.sampling import SamplingParams
from edgellm.scheduler import Scheduler, SchedulerConfig
from edgellm.sequence import Completion, Piece, Score, Sequence, completion_of
from edgellm.speculative.build import beside, target_share
from edgellm.speculative.build import build as build_speculation
from edgellm.speculative.cores import Share
from edgellm.speculative.options import SpeculationOptions
from edgellm.speculative.speculation import Speculation
from edgellm.step_time import StepTime
from edgellm.tokenizer import Tokenizer

_DOTS_PER_SECOND = 100e9  # of a core: a first guess
LOGITS_TOKENS = 64  # of a step whose logits are all wanted: rows of a big vocabulary are big
_kernels = store.KernelStore()  # machine code is shared by all models of the process


class LLM:
    """A model ready to run. ``close`` (or ``with``) frees everything.

    ``n_ctx`` is the limit of one sequence (None: the model's, as far as memory allows; see
    ``notices``), ``n_threads`` None takes the physical performance cores allowed to the process, or
    the CPUs of ``cpu_mask`` ("0x3": the first two), on which the threads then stay;
    at most ``max_num_seqs`` sequences run together, ``type_k`` and ``type_v`` are what keys and
    values are kept in: f32, f16, q8_0 or q4_0. At the end of the context ``context_policy`` "error"
    ends a sequence, "ring" goes on: a token sees the first ``SINKS`` tokens and the newest
    n_ctx - SINKS; ``max_positions`` is where a sequence ends.
    ``max_num_batched_tokens`` and ``prefill_share`` are the scheduler's (see SchedulerConfig);
    with ``prefix_cache`` a request goes on from what others have computed of the same beginning.
    ``cache_tokens`` is the room for keys and values of all sequences together (None: n_ctx for each
    of max_num_seqs, as far as memory allows); what it gives away stays in ``host_cache_bytes`` of
    memory beside it for as long as that lasts. It is shared out in blocks of ``block_size`` tokens.
    ``n_gpu_layers`` of the last layers go to the GPU, the output matrix counted as one more (None:
    as many as fit, 0: none); ``offload`` says the rest of it (see offload.Options), and
    ``placement`` what came of it.
    ``speculation``: what guesses tokens, which are then checked several at a time (see
    speculative); the tokens stay the same.
    ``progress`` is told in words what loading is doing. ``samplers`` are functions (logits, tokens,
    position) that change the logits of every request before its own sampling, compiled by Numba.
    ``lora``: adapters (GGUF) whose corrections are added to the model's matrices, as paths or
    "FILE:scale".
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
        max_num_batched_tokens: int | None = None,
        prefill_share: float = 1.0,
        prefix_cache: bool = True,
        cache_tokens: int | None = None,
        host_cache_bytes: int = 0,
        block_size: int = BLOCK,
        n_gpu_layers: int | None = None,
        offload: Options | None = None,
        speculation: SpeculationOptions | None = None,
        samplers: Callable[..., None] | Iterable[Callable[..., None]] = (),
        lora: Given | Iterable[Given] = (),
        progress: Callable[[str], None] | None = None,
        **overrides: Unpack[Overrides],
    ) -> None:
        check_positive(
            n_ctx=n_ctx, n_threads=n_threads, max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens, cache_tokens=cache_tokens,
        )  # fmt: skip
        if n_threads is not None and n_threads > MOST_THREADS:
            raise EdgeLLMError(
                f"n_threads is {n_threads}; at most {MOST_THREADS} threads work together (-t)."
            )
        if not (isinstance(prefill_share, int | float) and 0 < prefill_share <= 1):
            raise EdgeLLMError(
                f"prefill_share must be above 0 and at most 1, not {prefill_share!r}."
            )
        if block_size not in BLOCKS or isinstance(block_size, bool):
            raise EdgeLLMError(
                f"block_size must be {', '.join(map(str, BLOCKS[:-1]))} or {BLOCKS[-1]}, "
                f"not {block_size!r}."
            )
        if context_policy not in ("error", "ring"):
            raise EdgeLLMError(f"context_policy must be error or ring, not {context_policy!r}.")
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise EdgeLLMError(f"The path of a model file is needed, not {path!r}.")
        if offload is not None and not isinstance(offload, Options):
            raise EdgeLLMError(f"offload must be edgellm.offload.Options, not {offload!r}.")
        self.offload_options = offload or Options()
        self._guesses = speculation or SpeculationOptions()
        if n_gpu_layers is not None:
            self.offload_options = replace(self.offload_options, n_gpu_layers=n_gpu_layers)
        samplers = [samplers] if callable(samplers) else samplers
        self._ring, self._prefix_cache = context_policy == "ring", prefix_cache
        self.type_k, self.type_v = type_k, type_v
        say = progress or (lambda text: None)
        self.notices: list[str] = []
        try:
            self._users = [compile_sampler(function) for function in samplers]
        except (UserSamplerError, targets.TargetError) as error:
            raise EdgeLLMError(str(error)) from None
        self.gguf = GGUF(path)
        self._runner: Runner | None = None
        self.speculation: Speculation | None = None
        try:
            apply_overrides(self.gguf, overrides)
            self.adapters = attach(self.gguf, lora)
            cpus = tuple(parse_mask(cpu_mask)) if cpu_mask is not None else ()
            self._load(n_ctx, n_threads, cpus, max_num_seqs, cache_tokens, block_size, say)
            self._start(max_num_batched_tokens, prefill_share, host_cache_bytes)
        except (ProgramError, targets.TargetError, store.StoreError, CpuMaskError) as error:
            self._give_up()
            raise EdgeLLMError(str(error)) from None
        except TeamError as error:
            self._give_up()
            raise EdgeLLMError(f"{error} (-t).") from None
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        """Free what loading took so far: its threads and a GPU's memory do not go by themselves."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None
        self.gguf.close()

    def _load(
        self, n_ctx: int | None, n_threads: int | None, cpus: tuple[int, ...], max_num_seqs: int,
        cache_tokens: int | None, block_size: int, say: Callable[[str], None],
    ) -> None:  # fmt: skip
        gguf = self.gguf
        self.path = str(gguf.path)
        self.config, graph = build_graph(gguf)
        self.n_vocab = graph.n_vocab
        self._tokenizer = tokenizer_in_background(gguf)
        self.is_threads_asked = n_threads is not None or bool(cpus)
        share = Share(n_threads or len(cpus) or default_threads(), cpus)
        share = target_share(self._guesses, share, self.is_threads_asked)
        self.n_threads, self.cpus = share.n_threads, (cpus := share.cpus)
        if self.n_threads > (n_cores := len(cpus or allowed_cpus())):
            cores = "one core" if n_cores == 1 else f"{n_cores} cores"
            self.notices.append(
                f"{self.n_threads} threads on {cores} stand in each other's way (-t)."
            )
        context = fit_context(
            gguf, self.config, n_ctx, max_num_seqs, self.type_k, self.type_v, self._ring,
            graph.n_positions, cache_tokens, block_size, beside(self._guesses),
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
            max_out=max(LOGITS_TOKENS + max_num_seqs, whole),
            max_seqs=max_num_seqs,
            n_ctx=context.n_positions,
            n_blocks=context.n_blocks,
            k_type=self.type_k,
            v_type=self.type_v,
            window=context.window,
            sinks=context.sinks,
            n_states=context.n_states,
            block=block_size,
            cpus=cpus,
        )
        least = cache_tokens or n_ctx or (None if graph.is_causal else context.n_ctx)
        n_layers = self.config.n_layers
        placed = placement.place(graph, n_layers, limits, self.offload_options, least)
        before = _kernels.compiled, _kernels.loaded, _kernels.seconds
        _kernels.progress = compile_progress(say)
        self.graph = graph
        try:
            self._runner, self.placement = placement.load(
                placed, self.offload_options, graph,
                lambda limits, offload: Runner(
                    gguf, graph, limits, _kernels, weights_progress(say), offload
                ),
            )  # fmt: skip
        finally:
            _kernels.progress = None
        self.kernel_stats = {
            "compiled": _kernels.compiled - before[0],
            "loaded": _kernels.loaded - before[1],
            "seconds": _kernels.seconds - before[2],
        }
        self.max_num_seqs = max_num_seqs
        limits = self._limits = self.placement.limits
        self.cache_tokens = limits.n_blocks * limits.block  # of all sequences together
        if limits.n_ctx < self.max_positions:
            self.n_ctx = self.max_positions = limits.n_ctx
        self.notices += self.placement.plan.notes
        self._prompts = Prompts(
            self._tokenizer.result, self.n_vocab, self.max_positions, self._users,
            self.chat_template, limits.block if graph.is_recurrent else None,
        )  # fmt: skip

    def _start(
        self, max_num_batched_tokens: int | None, prefill_share: float, host_cache_bytes: int
    ) -> None:
        """The loop over the loaded model."""
        runner, limits = self.runner, self._limits
        self.metrics = Metrics()
        runner.cache.reuse = self._prefix_cache
        # measured from the first step on; until then as many multiplications as any core manages
        dots = step_cost(self.graph, self.type_k, self.type_v, [(1, 0)], 0).dots
        step_time = StepTime(dots / (self.n_threads * _DOTS_PER_SECOND))
        if host_cache_bytes:
            runner.cache.use_tier(
                HostTier(
                    host_cache_bytes, runner.read_block, runner.write_block,
                    lambda: limits.block * step_time.token_seconds,
                )
            )  # fmt: skip
        if self.placement.plan.streamed and max_num_batched_tokens is None:
            # a step copies the same weights for one token as for many
            max_num_batched_tokens = limits.max_tokens
        config = SchedulerConfig(
            self.max_num_seqs,
            limits.max_tokens,
            LOGITS_TOKENS,
            max_num_batched_tokens,
            prefill_share,
        )
        self.speculation = build_speculation(self, self._guesses, step_time)
        scheduler = Scheduler(runner.cache, config, step_time, self.metrics)
        self._loop = Loop(
            runner, scheduler, step_time, self.metrics, self._tokenizer.result, self.max_positions,
            self.speculation,
        )  # fmt: skip
        self._lock = threading.RLock()  # callers' threads take turns; one step at a time

    # ---- text -------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer.result()

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.gguf.metadata

    @property
    def chat_template(self) -> str | None:
        return self.gguf.string("tokenizer.chat_template", None)

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
    def generate(
        self,
        prompts: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        n: None = None,
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: list[Prompt],
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        n: None = None,
    ) -> list[Completion]: ...
    @overload
    def generate(
        self,
        prompts: list[str],
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        n: None = None,
    ) -> list[Completion]: ...
    @overload
    def generate(
        self,
        prompts: list[list[int]],
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        n: None = None,
    ) -> list[Completion]: ...
    @overload
    def generate(
        self, prompts: Any, params: SamplingParams | None = None,
        options: RequestOptions | None = None, *, n: int,
    ) -> Any: ...  # fmt: skip
    def generate(
        self, prompts: Any, params: SamplingParams | None = None,
        options: RequestOptions | None = None, *, n: int | None = None,
    ) -> Any:  # fmt: skip
        """Complete a prompt (text or token ids), or a list of them together in order. With ``n``
        each prompt has a list of n completions, which share what was computed of the prompt.

        Without ``options`` a list of prompts is in the batch lane: it is done as fast as possible
        as a whole, a single prompt is answered as soon as possible.
        """
        if not isinstance(prompts, str | list | tuple | np.ndarray):
            raise EdgeLLMError("A prompt is a text, a list of token ids, or a list of those.")
        one = isinstance(prompts, str) or (len(prompts) > 0 and is_tokens(prompts))
        params = params or SamplingParams()
        several: Any = [prompts] if one else prompts
        options = options or RequestOptions(priority="interactive" if one else "batch")
        options = replace(options, most_pieces=None)  # none is taken before the end
        requests: list[list[Sequence]] = []
        try:
            for prompt in several:
                requests.append(self.prepare(prompt, params, options, 1 if n is None else n))
            for choices in requests:
                self.enqueue(choices)
            while any(s.finish_reason is None for choices in requests for s in choices):
                self.step()
        finally:
            for choices in requests:
                self._forget_all(choices)
        for choices in requests:
            for sequence in choices:
                sequence.raise_error()
        answers: Any = [[completion_of(s) for s in choices] for choices in requests]
        if n is None:
            answers = [choices[0] for choices in answers]
        return answers[0] if one else answers

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None,
        options: RequestOptions | None = None,
    ) -> Iterator[Piece]:  # fmt: skip
        """The completion piece by piece, computed as pieces are taken; leaving the loop early frees
        the sequence."""
        return self._stream(self.prepare(prompt, params or SamplingParams(), options)[0])

    def _stream(self, sequence: Sequence) -> Iterator[Piece]:
        try:
            self.enqueue([sequence])
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
        out = np.empty((len(token_ids), self.n_vocab), np.float32)
        for position, rows in self.scan(token_ids):
            out[position : position + len(rows)] = rows
        return out

    def scan(
        self, token_ids: list[int], first: int = 0
    ) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """The logits behind the tokens from position ``first`` on, some rows at a time: the
        position of the first row, and float32 [n, n_vocab], valid until the next. The model is
        not free for others until the last was taken."""
        self._check_generates()
        sequence = self.sequence(token_ids, SamplingParams(max_tokens=1, temperature=0))
        with self._turn():
            runner = self._ready()
            if not runner.cache.admit(sequence, reuse=False):
                raise EngineError("No room for another sequence; finish or close open streams.")
            try:
                n_tokens, start = len(sequence.tokens), 0
                while start < n_tokens:
                    n = min(LOGITS_TOKENS, (first if start < first else n_tokens) - start)
                    rows = self._forward([Run(sequence, n, "none" if start < first else "all")])
                    if start >= first:
                        yield start, rows
                    start += n
            finally:
                runner.cache.release(sequence)

    def score(self, token_ids: list[int], n_top: int) -> list[Score]:
        """What the model thinks of a text: for each token its log-probability behind those before
        it (None for the first) and the ``n_top`` most likely ones."""
        params = SamplingParams(max_tokens=0, prompt_logprobs=n_top)
        return self.generate(token_ids, params).prompt_logprobs or []

    @property
    def is_encoder(self) -> bool:
        """Whether the model makes embeddings instead of text."""
        return not self.graph.is_causal

    def embed(self, prompts: Any) -> NDArray[np.float32]:
        """What an encoder makes of a text (or token ids): float32 [n_embd] of length 1, or
        [n, n_embd] of a list of them."""
        if self.graph.is_causal:
            raise EdgeLLMError(
                f"A model of the architecture {self.config.architecture} generates text; "
                "embeddings need an encoder, such as bert or nomic-bert."
            )
        if isinstance(prompts, str) or (len(prompts) > 0 and is_tokens(prompts)):
            vector: NDArray[np.float32] = self.embed([prompts])[0]
            return vector
        kind, vectors = pooling_of(self.config), []
        for prompt in prompts:
            sequence = self.sequence(prompt, SamplingParams(max_tokens=1))
            with self._turn():
                cache = self._ready().cache
                if not cache.admit(sequence, reuse=False):
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
        return self.on_tensors({self._tensor(name): function})

    def on_tensors(self, functions: Mapping[Tensor, HookFunction]) -> Callable[[], None]:
        """``on`` for tensors of ``graph``, many at once."""
        if self.placement.plan.uses_device:
            raise EdgeLLMError("Hooks see what runs on the CPU: load the model with --ngl 0.")
        with self._turn():
            program = self._ready().program
            hooks = program.add_hooks(functions)
            self._reuse_unless_hooked()

        def remove() -> None:
            for _, hook in hooks:
                hook.is_active = False
            if inside_hook():  # their stages stay, without effect, until hooks change again
                return
            with self._turn():
                if self._runner is not None:
                    program.remove_hooks(hooks)
                    self._reuse_unless_hooked()

        return remove

    def replace(self, name: str, data: NDArray[np.uint8] | None) -> None:
        """Go on with these bytes, of the same format, in place of a matrix or the embedding table;
        None: with the file's own again. EdgeLLMError for a tensor that is neither, or on a GPU."""
        if self.placement.plan.uses_device:
            raise EdgeLLMError("A tensor is replaced on the CPU: load the model with --ngl 0.")
        ops = [op for op in self.graph.ops if any(w.name == name for w in op.weights.values())]
        matrices = [op.weights["weight"] for op in ops if op.kind in MATRIX_OPS]
        matrices = [weight for weight in matrices if weight.name == name]
        is_table = any(op.kind == "embed" for op in ops)
        if not matrices and not is_table:
            raise EdgeLLMError(f"{name} is no matrix of {self.path}, and not its embedding table.")
        with self._turn():
            runner = self._ready()
            self.gguf.replace(self.gguf.tensors[name], data)
            if matrices:
                runner.program.weights.fill_again(matrices[0], self.n_threads)
                if not is_table:  # packed by now
                    self.gguf.replace(self.gguf.tensors[name], None)
            self._reuse_unless_hooked()  # what was computed with the other one is of no use

    def _reuse_unless_hooked(self) -> None:
        """A hook has to see every token, and what it changed must not outlive it."""
        runner = self._ready()
        runner.cache.start_anew(reuse=self._prefix_cache and not runner.program.hooks)

    def _tensor(self, name: str) -> Tensor:
        """The tensor a hook names; EdgeLLMError lists what there is."""
        named = {}
        for op in self.graph.ops:
            if op.kind in MATRIX_OPS:
                named[op.weights["weight"].name.removesuffix(".weight")] = op.output
            if op.layer is not None:
                named[f"blk.{op.layer}.resid"] = op.output  # the layer's last op stays
        adapted = self.graph.adapted.items()  # hooks see what adapters have added to
        named |= {matrix.removesuffix(".weight"): tensor for matrix, tensor in adapted}
        named["output"] = self.graph.output
        if name not in named:
            parts = sorted({re.sub(r"^blk\.\d+\.", "blk.N.", n) for n in named})
            raise EdgeLLMError(
                f"No tensor {name!r} to hook; this model has {', '.join(parts)} for layers "
                f"N = 0 to {self.config.n_layers - 1}."
            )
        return named[name]

    def placement_report(self) -> list[str]:
        """Lines: which layer runs where, in which types, how many bytes, and what was decided."""
        names = {name: device.name for name, device in self.placement.used.items()}
        plan = self.placement.plan
        return placement_report(plan, self.graph, self.type_k, self.type_v, names)

    # ---- the loop ---------------------------------------------------------------------------

    def step(self) -> bool:
        """Compute one step for whoever is waiting; finished text is put on the sequences. False
        when there was nothing to compute."""
        with self._turn():
            self._ready()
            return self._loop.step()

    def _forward(self, runs: list[Run]) -> NDArray[np.float32]:
        try:
            return self._ready().forward(runs)
        except TeamError as error:
            raise EngineError(f"{error}.") from None

    # ---- state ------------------------------------------------------------------------------

    @property
    def _last(self) -> Sequence | None:
        return self._loop.last

    @property
    def timings(self) -> dict[str, float]:
        """Of the request that finished last, in llama.cpp's names."""
        return self._last.timings() if self._last else {}

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
        """Nothing waits or runs, and no cache block is held."""
        return self._loop.scheduler.is_idle and self._ready().cache.is_idle

    @property
    def is_alive(self) -> bool:
        """Whether steps can be computed: not closed, not the copy of a forked process, no device
        failed, and a draft model, if there is one, goes on too."""
        runner, guesses = self._runner, self.speculation
        return runner is not None and runner.is_alive and (guesses is None or guesses.is_alive)

    @property
    def lost_device(self) -> str:
        """The name of a GPU that failed under the model or its draft model (see Runner)."""
        runner, guesses = self._runner, self.speculation
        lost = runner.lost_device if runner is not None else ""
        return lost or (guesses.lost_device if guesses is not None else "")

    @property
    def scheduler(self) -> Scheduler:
        return self._loop.scheduler

    @property
    def runner(self) -> Runner:
        """What computes steps: for measurements while no request runs (see edgellm.steps)."""
        return self._ready()

    def report(self) -> list[dict[str, Any]]:
        """The kernel of every matrix: tensor, type, shape, place, kernel, packed."""
        rows = []
        for op in self.graph.ops:
            if op.kind in MATRIX_OPS:
                weight = op.weights["weight"]
                kernel = linear_kernel(weight.type, targets.current(), weight.precise)
                place = self.placement.plan.place_of(op.layer, weight.name)
                on_cpu = place == CPU
                rows.append(
                    {"tensor": weight.name, "type": weight.type.name, "shape": weight.shape,
                     "place": place, "packed": kernel.is_packed or not on_cpu,
                     "kernel": kernel.name if on_cpu else f"{weight.type.name} on {place}"}
                )  # fmt: skip
        return rows

    def close(self) -> None:
        """Stop the threads and free weights and cache; the object cannot be used afterwards."""
        if self._runner is not None and not inside_hook():
            self._runner.program.team.abort()  # a step of another thread ends early
        with self._turn():
            runner, self._runner = self._runner, None
            speculation, self.speculation = self.speculation, None
            if speculation is not None:
                speculation.close()
            if runner is not None:
                runner.close()
            self.gguf.close()

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

    def sequence(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions | None = None
    ) -> Sequence:
        """A request that is not queued yet. EdgeLLMError for one that cannot be served."""
        self._ready()
        return self._prompts.sequences(prompt, params, options, 1)[0]

    def submit(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions | None = None,
        n: int = 1,
    ) -> list[Sequence]:  # fmt: skip
        """Queue a request of n choices: ``step`` until each has a ``finish_reason``, or ``forget``
        them."""
        choices = self.prepare(prompt, params, options, n)
        self.enqueue(choices)
        return choices

    def prepare(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions | None = None,
        n: int = 1,
    ) -> list[Sequence]:  # fmt: skip
        """The n choices of a request, checked but not queued yet. Waits for no step, so any thread
        may do this at any time. EdgeLLMError for what can never be served."""
        self._ready()
        choices = self._prompts.sequences(prompt, params, options, n)
        self._check_generates()
        first = choices[0]
        wanted = first.params.max_tokens
        most = self.max_positions if wanted is None else first.n_prompt + wanted
        if not self._ready().cache.fits(min(most, self.max_positions)):
            raise ContextFull(
                "The request can never fit into the key-value cache (-c).",
                first.n_prompt, self.max_positions,
            )  # fmt: skip
        return choices

    def enqueue(self, choices: list[Sequence]) -> None:
        """Queue a request that ``prepare`` made."""
        with self._turn():
            self._ready()
            self._loop.scheduler.add(choices[0])

    def cache_report(self, request: Completion | Sequence) -> CacheReport | None:
        """What the cache had of a request's prompt; None before it is begun."""
        return None if request.known is None else request.known.report(self.tokenizer.eog)

    def explain(self, request: Completion | Sequence) -> str:
        """Why so much of a request's prompt had to be computed, in a sentence."""
        report = self.cache_report(request)
        return "The request was not begun." if report is None else report.text(self.detokenize)

    def save_cache(
        self, path: str | os.PathLike[str], tokens: list[int], cache_salt: str = ""
    ) -> int:
        """Write what the cache has of these tokens to a file; returns how many that are. Other
        requests go on while it is written."""
        with self._turn():
            saved = kv_session.snapshot(self, tokens, cache_salt)
        kv_file.write(Path(path), kv_session.layout(self), saved)
        return len(saved.tokens)

    def load_cache(self, path: str | os.PathLike[str], cache_salt: str = "") -> int:
        """Put what ``save_cache`` wrote into the cache: a prompt that begins with those tokens goes
        on from there. Returns how many tokens; KVFileError for a file that does not fit."""
        saved = kv_file.read(Path(path), kv_session.layout(self))
        with self._turn():
            kv_session.insert(self, saved, Path(path), cache_salt)
        return len(saved.tokens)

    def erase_cache(self, tokens: list[int], cache_salt: str = "") -> int:
        """Forget what the cache has of these tokens, if no request uses it now; returns how many
        tokens that were."""
        with self._turn():
            return kv_session.erase(self, tokens, cache_salt)

    @property
    def seats(self) -> Mapping[int, Seat]:
        """What the last request in each seat came to."""
        return self._loop.seats

    def _check_generates(self) -> None:
        if not self.graph.is_causal:
            raise EdgeLLMError(
                f"A model of the architecture {self.config.architecture} makes embeddings, not "
                "text: use LLM.embed."
            )

    def forget(self, sequence: Sequence) -> None:
        """Free what a request holds, finished or not."""
        self._forget_all([sequence])

    def fail(self, sequences: Iterable[Sequence], error: Exception) -> None:
        """End requests with an error, also when the model is closed already."""
        with self._turn():
            self._loop.fail((s for s in sequences if s.finish_reason is None), error)

    def _forget_all(self, choices: list[Sequence]) -> None:
        if self._runner is None:
            return
        with self._turn():
            for sequence in choices:  # the first hands its forks to the queue
                self._loop.scheduler.remove(sequence)


__all__ = ["LLM", "SINKS", "Completion", "ContextFull", "EngineError"]
