"""Plans of five real model shapes against an emulated device that accounts for every byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import architectures
import numpy as np
import pytest

from edgellm.kernels.cpu.inputs import AttentionGroup, Limits
from edgellm.kernels.cpu.lower_attention import shape_of
from edgellm.kernels.cuda import emulated
from edgellm.kernels.cuda.program import DeviceProgram
from edgellm.kernels.cuda.weights import DeviceWeights
from edgellm.kernels.graph import Graph, Op, Weight
from edgellm.kernels.rows import select_early
from edgellm.kernels.split import places, split
from edgellm.models import _module
from edgellm.models.config import Config
from edgellm.offload import Options, Room, Stream
from edgellm.offload_sizes import device_sizes, fitted_plan
from edgellm.quant import by_name
from edgellm.quant.gguf import GGUF

GiB = 1 << 30
RMS = "attention.layer_norm_rms_epsilon"
# architecture, vocabulary, layers, width, heads, key-value heads, head, feed-forward, more
SHAPES: dict[str, tuple[str, int, int, int, int, int, int, int, dict[str, Any]]] = {
    "llama 8B": ("llama", 128256, 32, 4096, 32, 8, 128, 14336, {}),
    "qwen2.5 1.5B": ("qwen2", 151936, 28, 1536, 12, 2, 128, 8960, {}),
    "gemma3 4B": ("gemma3", 262144, 34, 2560, 8, 4, 256, 10240, {"attention.sliding_window": 1024}),
    "qwen3-30b-a3b": ("qwen3moe", 151936, 48, 2048, 32, 4, 128, 6144, {
        "expert_count": 128, "expert_used_count": 8, "expert_feed_forward_length": 768}),
    "llama 70B": ("llama", 128256, 80, 8192, 64, 8, 128, 28672, {}),
}  # fmt: skip
TIED = ("qwen2.5 1.5B", "gemma3 4B")
LIMITS = Limits(2, 256, 72, 8, 4096, 128)  # 4096 tokens of cache


class Shapes(architectures.Recorder):
    """Weights of a Q4_K_M file that is not there."""

    n_vocab = 0

    def __call__(self, name: str, *shape: int, suffix: str = "weight") -> Weight:
        shape = tuple(n or self.n_vocab for n in shape)
        short, kind = name.rpartition(".")[2], "q4_k"
        if short in ("ffn_down", "ffn_down_exps", "attn_v", "output", "token_embd"):
            kind = "q6_k"
        if len(shape) == 1 or short.endswith("_inp") or suffix != "weight":
            kind = "f32"
        return Weight(f"{name}.{suffix}", by_name(kind), shape)


def graph_of(name: str, path: Path) -> Graph:
    arch, n_vocab, n_layers, n_embd, heads, kv_heads, head, n_ff, more = SHAPES[name]
    keys = {
        "context_length": 8192, "embedding_length": n_embd, "block_count": n_layers,
        "feed_forward_length": n_ff, "attention.head_count": heads,
        "attention.head_count_kv": kv_heads, "attention.key_length": head,
        "attention.value_length": head, "rope.freq_base": 1e6, "rope.dimension_count": head,
        RMS: 1e-6, **more,
    }  # fmt: skip
    architectures._write(path, arch, keys, {})
    with GGUF(path) as empty:
        config = Config.read(empty)
        has = ("ffn_gate", "attn_q.bias", "attn_k.bias", "attn_v.bias")
        weights = Shapes(empty, has if name in TIED else ("output", "ffn_gate"))
        weights.n_vocab = n_vocab
        config.__dict__["weights"] = weights
        graph: Graph = _module(arch).build(config)
    return graph


@pytest.fixture(scope="module", params=SHAPES)
def model(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Graph, int]:
    graph = graph_of(request.param, tmp_path_factory.mktemp("shapes") / "m.gguf")
    return graph, SHAPES[request.param][2]


class Nothing:
    """Memory that is accounted for and not there."""

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes, self.address = n_bytes, 1 << 40

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def no_bytes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(emulated, "GuardedMemory", Nothing)
    monkeypatch.setattr(DeviceWeights, "fill", lambda self, n_threads, progress: None)
    yield


def group_of() -> Callable[[Op], AttentionGroup]:
    groups: dict[Any, AttentionGroup] = {}

    def find(op: Op) -> AttentionGroup:
        shape = shape_of(SimpleNamespace(limits=LIMITS), op)  # type: ignore[arg-type]
        if shape not in groups:
            groups[shape] = AttentionGroup(shape, LIMITS, np.zeros(1, np.int64))
        return groups[shape]

    return find


@pytest.mark.parametrize("stream", ["off", "on"])
@pytest.mark.parametrize("gigabytes", [0.5, 0.9, 2, 5, 8, 11, 16, 24])
def test_what_is_loaded_never_exceeds_memory_and_uses_nearly_all_of_it(
    model: tuple[Graph, int], gigabytes: float, stream: Stream
) -> None:
    graph, n_layers = model
    total = int(gigabytes * GiB)
    room = Room("cuda0", total, total)
    sizes = device_sizes(graph, n_layers, LIMITS)
    made = fitted_plan(graph, sizes, LIMITS, [room], Options(stream=stream))
    device = emulated.EmulatedDevice(room.budget(None))  # not a byte of the margin is there
    whole = select_early(graph, ())
    parts = split(whole, places(whole, made.place_of, made.kv_place))
    mine = [part for part in parts if part.place == "cuda0"]
    program = DeviceProgram(device, mine, LIMITS, lambda weight, start, out: None, made.streamed)
    program.load(group_of())
    assert device.used <= made.taken["cuda0"].total
    if sizes.total > room.budget(None):
        assert device.used >= 0.9 * device.total
    else:
        assert made.n_gpu_layers == n_layers + 1
