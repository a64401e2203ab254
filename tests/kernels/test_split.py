"""Graphs cut by place: every cut computes what the whole does, and cuts are few."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import architectures
import numpy as np
import pytest
from numpy.typing import NDArray

from edgellm import LLM
from edgellm.kernels.graph import Graph, Tensor, Weight
from edgellm.kernels.reference import Step, evaluate, run
from edgellm.kernels.rows import select_early
from edgellm.kernels.split import CPU, Part, cpu_graph, outputs, places, split
from edgellm.models import build_graph
from edgellm.offload import Plan
from edgellm.quant.gguf import GGUF
from edgellm.runner import Offload, Runner

NAMES = ("llama", "llama-moe", "gemma3", "qwen3moe", "gpt-oss", "deepseek2", "gpt2", "qwen35")


def graph_of(path: Path) -> Graph:
    return build_graph(GGUF(path))[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("split")
    return lambda name: architectures.write(folder / f"{name}.gguf", name)


def loader(file: GGUF) -> Callable[[Weight], NDArray[np.float32]]:
    def load(weight: Weight) -> NDArray[np.float32]:
        rows = np.prod(weight.shape[1:], dtype=int)
        raw = np.empty((rows, weight.type.row_bytes(weight.n_in)), np.uint8)
        file.read_into(file.tensors[weight.name], 0, raw.reshape(-1))
        return weight.type.dequantize(raw).reshape(weight.shape[::-1])

    return load


def cut(path: Path, placed: Plan) -> tuple[Graph, list[Part]]:
    whole = select_early(graph_of(path), ())
    return whole, split(whole, places(whole, placed.place_of, placed.kv_place))


def some_plans(n: int) -> list[Plan]:
    gpu = ["cuda0"] * (n + 1)
    return [
        Plan(gpu), Plan([CPU, *gpu[1:]]), Plan([*gpu[1:], CPU]), Plan([CPU] * n + ["cuda0"]),
        Plan(gpu, kv_offload=False), Plan(["cuda0", *["cuda1"] * n]),
    ]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_cut_computes_what_the_whole_graph_does(model: Callable[[str], Path], name: str
                                                      ) -> None:  # fmt: skip
    path = model(name)
    file = GGUF(path)

    load = loader(file)
    tokens = np.arange(3, 20) * 5 % architectures.N_VOCAB
    expected = run(build_graph(file)[1], tokens, load)
    step = Step(tokens, np.arange(len(tokens)), load)
    n_layers = build_graph(file)[0].n_layers
    for placed in some_plans(n_layers):
        whole, parts = cut(path, placed)
        assert sorted(id(op) for p in parts for op in p.ops) == sorted(id(o) for o in whole.ops)
        host: dict[Tensor, NDArray[np.float32]] = {}
        own: dict[str, dict[Tensor, NDArray[np.float32]]] = {}
        for op in cpu_graph(whole, parts).ops:
            if op.kind != "part":
                host[op.output] = evaluate(op, [host[t] for t in op.inputs], step)
                continue
            part: Part = op.attrs["part"]
            values = own.setdefault(part.place, {})
            values |= {t: host[t] for t in part.reads}  # KeyError: read before it is there
            for inner in part.ops:
                values[inner.output] = evaluate(inner, [values[t] for t in inner.inputs], step)
            host |= {t: values[t] for t in outputs(op)}
        assert np.array_equal(host[whole.output], expected)


def test_layers_that_follow_each_other_are_one_part(model: Callable[[str], Path]) -> None:
    path = model("qwen3moe")
    n = build_graph(GGUF(path))[0].n_layers
    assert [p.place for p in cut(path, Plan(["cuda0"] * (n + 1)))[1]] == [CPU, "cuda0"]
    half = Plan([CPU, *["cuda0"] * n])
    (first, second) = cut(path, half)[1]
    assert len(second.reads) == 1 and second.writes == [second.ops[-1].output]
    assert {op.layer for op in first.ops} == {None, 0}


def test_experts_on_the_cpu_take_their_activation_and_sum_along(model: Callable[[str], Path]
                                                                ) -> None:  # fmt: skip
    path = model("qwen3moe")
    config, graph = build_graph(GGUF(path))
    experts = {
        w.name: CPU for op in graph.ops if op.kind == "moe_linear" for w in [op.weights["weight"]]
    }
    placed = Plan(["cuda0"] * (config.n_layers + 1), matrices=experts)
    _, parts = cut(path, placed)
    mine = [op.kind for p in parts[1:] if p.place == CPU for op in p.ops]
    one = ["moe_route", "moe_linear", "moe_linear", "swiglu", "moe_linear", "moe_sum"]
    assert mine == one * config.n_layers


class Reference:
    """A device whose kernels are the reference; it keeps the keys and values of its layers."""

    def __init__(self, parts: list[Part], load: Callable[[Weight], NDArray[np.float32]]) -> None:
        self.load_weight, self.past = load, dict[tuple[int, int], list[NDArray[np.float32]]]()
        self.n_runs = 0

    def load(self, group_of: Callable[..., object], progress: object) -> None: ...
    def pools(self, group: object) -> list[object]:
        return []

    def close(self) -> None: ...

    def begin(self, spans: list[tuple[int, int, int, int]], is_decode: list[bool],
              out_rows: NDArray[np.int64]) -> None:  # fmt: skip
        self.spans, self.out_rows = spans, out_rows.copy()
        self.values: dict[Tensor, NDArray[np.float32]] = {}

    def run(self, part: Part, rows: Callable[[Tensor], NDArray[np.float32]]) -> None:
        self.n_runs += 1
        values = self.values
        values |= {t: rows(t).copy() for t in part.reads}
        for op in part.ops:
            inputs = [values[t] for t in op.inputs]
            if op.kind in ("attention", "rope"):
                pieces = []
                for row, n, first, seat in self.spans:
                    mine = [x[row : row + n] for x in inputs]
                    if op.kind == "attention":
                        for i in (1, 2):
                            kept = self.past.setdefault((id(op), 8 * seat + i), [])
                            del kept[first:]
                            kept += list(mine[i])
                            mine[i] = np.array(kept)
                    step = Step(np.zeros(n, int), np.arange(first, first + n), self.load_weight,
                                n_ctx=512)  # fmt: skip
                    pieces.append(evaluate(op, mine, step))
                values[op.output] = np.concatenate(pieces)
            else:
                step = Step(np.zeros(1, int), np.zeros(1, int), self.load_weight, self.out_rows)
                values[op.output] = evaluate(op, inputs, step)
        for t in part.writes:
            rows(t)[:] = values[t]


@pytest.mark.parametrize("name", ("llama", "gemma3", "qwen3moe", "deepseek2"))
def test_cpu_program_with_parts_elsewhere(
    model: Callable[[str], Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU's program around parts that the reference computes: logits of prompts in pieces and
    generated tokens as of the CPU alone, but for the rounding of activations."""
    path = model(name)
    tokens = [int(t) for t in np.arange(3, 90) * 7 % architectures.N_VOCAB]
    with LLM(path, n_threads=2, n_ctx=512, type_k="f32", type_v="f32", prefix_cache=False) as llm:
        expected, limits, graph, file = llm.logits(tokens), llm._limits, llm.graph, llm.gguf
        n_layers = llm.config.n_layers
        load = loader(file)
        made: list[Reference] = []

        def programs(self: Runner, parts: list[Part], offload: Offload) -> dict[str, Reference]:
            names = dict.fromkeys(p.place for p in parts if p.place != CPU)
            made.extend(Reference(parts, load) for _ in names)
            return dict(zip(names, made[-len(names) :], strict=True))

        monkeypatch.setattr(Runner, "_programs", programs)
        for placed in some_plans(n_layers):
            runner = Runner(file, graph, limits, llm_store(), offload=Offload(placed, {}))
            whole, llm._runner = llm._runner, runner
            try:
                found = llm.logits(tokens)
            finally:
                runner.close()
                llm._runner = whole
            scale = np.abs(expected).max()
            # a few tokens of a mixture have other experts: their shares are nearly equal
            assert np.quantile(np.abs(found - expected).max(-1), 0.8) < 0.05 * scale
        assert all(device.n_runs for device in made)


def llm_store() -> object:
    from edgellm.llm import _kernels

    return _kernels
