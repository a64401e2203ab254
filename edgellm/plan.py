"""What a model would take and how fast it would be: layers on the GPU x context x cache type, and
where layers do not fit, with and without streaming them.

Nothing is loaded: sizes come from the file's headers, speeds from short measurements. ``check``
loads the best of them and compares.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from edgellm.cache_types import check_cache_types
from edgellm.errors import EdgeLLMError
from edgellm.forecast import Forecast, fit_prompt_curve
from edgellm.gpus import open_gpus, rooms
from edgellm.kernels.cpu.cores import default_threads
from edgellm.kernels.cpu.inputs import Limits
from edgellm.kernels.cpu.kv_types import BLOCK
from edgellm.llm import LLM, LOGITS_TOKENS
from edgellm.memory import STEP_TOKENS, available_bytes, bill, resident_bytes
from edgellm.models import build_graph
from edgellm.offload import Options, Plan, Sizes, Stream, cpu_only
from edgellm.quant.gguf import GGUF
from edgellm.speeds import Speeds, measure
from edgellm.steps import Steps

if TYPE_CHECKING:
    from edgellm.kernels.cuda.device import Device

CONTEXTS = (4096, 16384, 65536, 131072)
TYPES = ("f16", "q8_0", "q4_0")
_WORTH = {"f16": 1.0, "q8_0": 0.9, "q4_0": 0.8}  # a smaller cache has to be faster by this
STREAMED: tuple[Stream, ...] = ("off", "on")
_TIMES = 4  # that a prompt is measured
_LEAST_CHECKED = 32  # tokens of context
_CHECKED = (64, 128, 256)  # tokens of prompts; the last is foretold from the others


@dataclass(frozen=True)
class Line:
    """A way to run the model. Bytes on the CPU are all of the process but its code. ``n_streamed``
    of the layers on the GPU are streamed. ``asked``: which --ngl it is, None for auto, that may put
    other layers there than a number does."""

    asked: int | None
    n_gpu_layers: int
    n_streamed: int
    n_ctx: int
    type_kv: str
    cpu_bytes: int
    gpu_bytes: dict[str, int]
    fits: bool
    tokens_per_second: float  # at most, of one user at half of the context
    all_tokens_per_second: float  # of all users together
    first_token_seconds: float  # at least
    request_seconds: float  # at least, of a request of each user
    bill: dict[str, int]
    notes: list[str]  # of the placement

    def as_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


class Planner:
    """Lines for one file and ``users`` who talk at once."""

    def __init__(
        self, path: str | os.PathLike[str], users: int = 1, n_prompt: int = 512,
        fit_margin: int | None = None, speeds: Speeds | None = None,
        devices: Mapping[str, Device] | None = None,
    ) -> None:  # fmt: skip
        self.path, self.users, self.n_prompt = path, users, n_prompt
        self._file = GGUF(path)
        self.config, self.graph = build_graph(self._file)
        self.reason = ""
        if devices is None:
            devices, self.reason = open_gpus()
        self.devices, self._margin = devices, fit_margin
        self.speeds = speeds or measure(devices)
        self._rooms, self._sizes = rooms(devices), dict[Limits, Sizes]()
        self._available, self._runtime = available_bytes(), resident_bytes()

    def lines(
        self, layers: Iterable[int | None] | None = None, contexts: Sequence[int] = (),
        types: Sequence[str] = TYPES,
    ) -> list[Line]:  # fmt: skip
        """``layers`` None: none, half, what fits and all, where there is a GPU."""
        n_all = self.config.n_layers + 1
        if layers is None:
            layers = (0, n_all // 2, None, n_all) if self.devices else (0,)
        else:
            layers = tuple(layers)
        contexts = contexts or [*(n for n in CONTEXTS if n < self.config.n_ctx), self.config.n_ctx]
        found: dict[tuple[int, int, int, str], Line] = {}
        for kind in types:
            try:
                check_cache_types(self.config, self.graph, kind, kind)
            except EdgeLLMError:
                continue
            for n_ctx in sorted(set(contexts)):
                for n, stream in product(layers, STREAMED if self.devices else STREAMED[:1]):
                    line = self._line(n, n_ctx, kind, stream)
                    key = line.n_gpu_layers, line.n_streamed, n_ctx, kind
                    known = found.setdefault(key, line)
                    if known is not line:  # fewer layers than asked for: why
                        known.notes.extend(line.notes)
        return list(found.values())

    def best(self, lines: Sequence[Line]) -> Line | None:
        """The one that answers soonest of those that fit, and of equals the longest context; None:
        none fits."""
        fitting = [line for line in lines if line.fits]
        if not fitting:
            return None
        usual = [line for line in fitting if line.n_ctx >= min(CONTEXTS[0], self.config.n_ctx)]

        def worth(line: Line) -> tuple[float, int]:
            speed = _WORTH[line.type_kv] / line.request_seconds
            return float(f"{speed:.2g}"), line.n_ctx  # what differs by less is equal

        return max(usual or fitting, key=worth)

    def _line(self, n: int | None, n_ctx: int, kind: str, stream: Stream) -> Line:
        limits = limits_of(n_ctx, self.users, kind)
        made, sizes = self._plan(n, limits, stream)
        forecast = Forecast(self.graph, made, kind, kind, self.speeds)
        costs = bill(self._file, n_ctx, kind, kind)
        on_gpu = sum(taken.weights for taken in made.taken.values())
        kv_on_gpu = sum(taken.kv for taken in made.taken.values())
        kv = sum(layer.kv for layer in sizes.layers) if sizes else costs.kv * self.users
        parts = {
            "weights": max(0, costs.weights - on_gpu), "keys and values": max(0, kv - kv_on_gpu),
            "states": costs.state * self.users, "rows": costs.arena,
            "margin": int(0.1 * max(0, self._available - costs.weights)),
        }  # fmt: skip
        cpu = sum(parts.values()) - parts["margin"]
        for name, taken in made.taken.items():
            if taken.total:
                parts |= {f"{name} weights": taken.weights, f"{name} copies": taken.staging,
                          f"{name} keys and values": taken.kv,
                          f"{name} rows": taken.workspace}  # fmt: skip
        depth = n_ctx // 2
        return Line(
            n, made.n_gpu_layers, sum(len(t.streamed) for t in made.taken.values()), n_ctx, kind,
            cpu,
            {name: taken.total for name, taken in made.taken.items() if taken.total},
            cpu + parts["margin"] <= self._available,
            forecast.tokens_per_second(self.users, depth) / self.users,
            forecast.tokens_per_second(self.users, depth),
            forecast.first_token_seconds(min(self.n_prompt, n_ctx)),
            forecast.request_seconds(self.users, self.n_prompt), parts, made.notes,
        )  # fmt: skip

    def _plan(self, n: int | None, limits: Limits, stream: Stream) -> tuple[Plan, Sizes | None]:
        if not self.devices or n == 0:
            return cpu_only(self.config.n_layers), None
        from edgellm.offload_sizes import device_sizes, fitted_plan

        if limits not in self._sizes:
            self._sizes[limits] = device_sizes(self.graph, self.config.n_layers, limits)
        sizes, options = self._sizes[limits], Options(n, self._margin, stream=stream)
        return fitted_plan(self.graph, sizes, limits, self._rooms, options), sizes

    # ---- what came of it ------------------------------------------------------------------------

    def check(self, line: Line) -> list[dict[str, Any]]:
        """Load a line's model and measure: rows of what was planned and what there is."""
        if line.n_ctx < _LEAST_CHECKED:
            raise EdgeLLMError(
                f"--check measures a prompt and an answer, for which a context of {line.n_ctx} is "
                f"too short; ask for {_LEAST_CHECKED} at least (-c)."
            )
        before = resident_bytes()
        with LLM(
            self.path, n_ctx=line.n_ctx, max_num_seqs=self.users, type_k=line.type_kv,
            type_v=line.type_kv, cache_tokens=self.users * line.n_ctx, n_gpu_layers=line.asked,
            offload=Options(
                fit_margin=self._margin, stream="on" if line.n_streamed else "off"
            ),
        ) as llm:  # fmt: skip
            steps, n_most = Steps(llm), min(max(_CHECKED) + 16, llm.n_ctx)
            lengths = [n for n in _CHECKED if n <= n_most - 16] or [n_most // 2]
            seconds = [_prompt_seconds(steps, n, n_most) for n in lengths]
            sequence = steps.open(n_most)
            steps.prefill(sequence, lengths[-1])
            one = min(steps.decode([sequence]) for _ in range(8))
            steps.release(sequence)
            taken = resident_bytes() - before
            made = llm.placement.plan
            forecast = Forecast(self.graph, made, line.type_kv, line.type_kv, self.speeds)
            rows = [
                _row("tokens/s of one user", forecast.tokens_per_second(1, lengths[-1]), 1 / one),
                _row(f"seconds of {lengths[-1]} tokens",
                     forecast.first_token_seconds(lengths[-1]), seconds[-1]),
                _row("bytes of the process", line.cpu_bytes, taken),
            ]  # fmt: skip
            for name, device in llm.placement.used.items():
                free, total = device.memory()
                used = next(r.free for r in self._rooms if r.name == name) - free
                rows.append(_row(f"bytes of {name}", line.gpu_bytes.get(name, 0), used))
            if len(lengths) > 2:
                a, b = fit_prompt_curve(lengths[:-1], seconds[:-1])
                last = lengths[-1]
                rows.append(_row(f"{last} tokens by a n + b n^2", a * last + b * last * last,
                                 seconds[-1]))  # fmt: skip
            return rows

    def close(self) -> None:
        self._file.close()


def _prompt_seconds(steps: Steps, n: int, n_room: int) -> float:
    """The quickest of a few."""
    times = []
    for _ in range(_TIMES):
        sequence = steps.open(n_room)
        times.append(sum(steps.prefill(sequence, n)))
        steps.release(sequence)
    return min(times)


def _row(what: str, planned: float, measured: float) -> dict[str, Any]:
    return {"what": what, "planned": planned, "measured": measured,
            "ratio": measured / planned if planned else None}  # fmt: skip


def limits_of(n_ctx: int, users: int, kind: str) -> Limits:
    """What LLM lays a model's memory out for, with room for each user's context."""
    return Limits(
        n_threads=default_threads(), max_tokens=max(STEP_TOKENS, users),
        max_out=LOGITS_TOKENS + users, max_seqs=users, n_ctx=n_ctx,
        n_blocks=users * -(-n_ctx // BLOCK), k_type=kind, v_type=kind,
    )  # fmt: skip
