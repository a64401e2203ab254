"""Plans over sizes: never above the memory, never far below it, as asked, and said why."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.offload import (
    ALL,
    CPU,
    Layer,
    Matrix,
    OffloadError,
    Options,
    Plan,
    Room,
    Sizes,
    Stream,
)
from edgellm.offload_plan import plan

MiB, GiB = 1 << 20, 1 << 30
Q4, Q6 = 4.5 / 8, 6.5625 / 8  # bytes of a weight


def model(
    n_layers: int, n_embd: int, q: int, kv: int, n_ff: int, n_vocab: int, *, n_experts: int = 0,
    n_ctx: int = 4096, max_tokens: int = 256, tied: bool = False,
) -> Sizes:  # fmt: skip
    """A Q4_K_M model: ffn_down, attn_v and output in Q6_K; keys and values in f16."""
    times = max(1, n_experts)

    def layer(i: int) -> Layer:
        def m(name: str, weights: int, width: float, is_expert: bool = False) -> Matrix:
            return Matrix(f"blk.{i}.{name}.weight", int(weights * width), is_expert)

        end, expert = ("_exps", True) if n_experts else ("", False)
        return Layer(
            (
                m("attn_q", n_embd * q, Q4), m("attn_k", n_embd * kv, Q4),
                m("attn_v", n_embd * kv, Q6), m("attn_output", n_embd * q, Q4),
                m(f"ffn_gate{end}", times * n_embd * n_ff, Q4, expert),
                m(f"ffn_up{end}", times * n_embd * n_ff, Q4, expert),
                m(f"ffn_down{end}", times * n_embd * n_ff, Q6, expert),
            ),
            kv=2 * 2 * kv * n_ctx, other=8 * n_embd,
        )  # fmt: skip

    name = "token_embd.weight" if tied else "output.weight"
    output = Layer((Matrix(name, int(n_embd * n_vocab * Q6)),), other=4 * n_embd)
    rows = max_tokens * 4 * (3 * n_embd + 2 * q + 2 * kv + 3 * n_ff)
    return Sizes(tuple(layer(i) for i in range(n_layers)), output, rows + 64 * 4 * n_vocab)


MODELS = {
    "llama 8B": model(32, 4096, 4096, 1024, 14336, 128256),
    "qwen2.5 1.5B": model(28, 1536, 1536, 256, 8960, 151936, tied=True),
    "gemma3 4B": model(34, 2560, 2048, 1024, 10240, 262144, tied=True),
    "qwen3-30b-a3b": model(48, 2048, 4096, 512, 768, 151936, n_experts=128),
    "llama 70B": model(80, 8192, 8192, 1024, 28672, 128256),
}


def used(sizes: Sizes, made: Plan) -> dict[str, int]:
    """Bytes of each device, counted again from the places alone."""
    found: dict[str, int] = {}
    copied: dict[str, list[int]] = {}
    for i, layer in enumerate((*sizes.layers, sizes.output)):
        unit = sum(m.n_bytes for m in layer.matrices if m.name in made.streamed)
        if unit:
            copied.setdefault(made.places[i], []).append(unit)
        at = made.places[i]
        if at != CPU:
            found[at] = found.get(at, 0) + layer.other + (layer.kv if made.kv_offload else 0)
        for m in layer.matrices:
            place = made.matrices.get(m.name, at)
            if place != CPU and m.name not in made.streamed:
                found[place] = found.get(place, 0) + m.n_bytes
    for place, units in copied.items():
        found[place] = found.get(place, 0) + min(2, len(units)) * max(units)
    return {name: n + sizes.workspace for name, n in found.items() if n}


@pytest.mark.parametrize("name", MODELS)
@settings(deadline=None, max_examples=40)
@given(gigabytes=st.floats(0.5, 24.0))
def test_plan_never_exceeds_memory_and_uses_nearly_all_of_it(name: str, gigabytes: float) -> None:
    sizes, total = MODELS[name], int(gigabytes * GiB)
    room = Room("cuda0", total, total)
    made = plan(sizes, [room])
    taken = used(sizes, made).get("cuda0", 0)
    budget = room.budget(None)
    assert taken == made.taken["cuda0"].total <= budget < total
    if sizes.total > budget:
        assert taken >= 0.9 * budget
    else:
        assert made.n_gpu_layers == len(sizes.layers) + 1 and not made.matrices


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(sorted(MODELS)),
    gigabytes=st.lists(st.floats(0.1, 24.0), min_size=1, max_size=4),
    n=st.one_of(st.none(), st.integers(0, 90)), n_cpu_moe=st.integers(0, 60),
    kv=st.booleans(), split=st.booleans(), stream=st.sampled_from(["on", "off"]),
)  # fmt: skip
def test_any_options_on_any_devices_stay_within_memory(
    name: str, gigabytes: list[float], n: int | None, n_cpu_moe: int, kv: bool, split: bool,
    stream: Stream,
) -> None:  # fmt: skip
    sizes = MODELS[name]
    rooms = [Room(f"cuda{i}", int(g * GiB), int(g * GiB)) for i, g in enumerate(gigabytes)]
    shares = tuple(float(i + 1) for i in range(len(rooms))) if split else ()
    options = Options(n, n_cpu_moe=n_cpu_moe, kv_offload=kv, tensor_split=shares, stream=stream)
    made = plan(sizes, rooms, options)
    for room in rooms:
        assert used(sizes, made).get(room.name, 0) <= room.budget(None)
    if n is not None:
        assert made.n_gpu_layers <= n
    assert all(used(sizes, made).get(n, 0) == t.total for n, t in made.taken.items())
    # from the last layer down, and each device's layers side by side
    layers = made.places[:-1]
    first = next((i for i, p in enumerate(layers) if p != CPU), len(layers))
    assert CPU not in layers[first:]
    assert layers[first:] == sorted(layers[first:], key=lambda p: int(p.removeprefix("cuda")))


def test_number_counts_the_last_layers_and_the_output_is_one_more() -> None:
    sizes, room = MODELS["llama 8B"], Room("cuda0", 80 * GiB, 80 * GiB)
    assert plan(sizes, [room], Options(1)).places == [CPU] * 31 + ["cuda0", CPU]
    assert plan(sizes, [room], Options(32)).places == ["cuda0"] * 32 + [CPU]
    assert plan(sizes, [room], Options(33)).places == ["cuda0"] * 33
    assert plan(sizes, [room], Options(ALL)).places == ["cuda0"] * 33
    assert not plan(sizes, [room], Options(0)).uses_device


@pytest.mark.parametrize("name", MODELS)
@settings(deadline=None, max_examples=20)
@given(gigabytes=st.floats(0.5, 24.0))
def test_streamed_layers_fill_the_memory_and_no_more(name: str, gigabytes: float) -> None:
    sizes, total = MODELS[name], int(gigabytes * GiB)
    room = Room("cuda0", total, total)
    made = plan(sizes, [room], Options(stream="on"))
    taken, budget = used(sizes, made).get("cuda0", 0), room.budget(None)
    assert taken == made.taken["cuda0"].total <= budget
    if made.streamed:
        assert taken >= 0.9 * budget
        assert made.notes[0].startswith("cuda0 has no room for ")
    # what can only be with streaming: every layer of a model larger than the memory
    if name == "llama 8B" and 2 < gigabytes < 4:
        assert made.streamed and CPU not in made.places[:-1]
        assert made.n_gpu_layers > plan(sizes, [room]).n_gpu_layers


def test_more_than_fits_is_cut_with_a_sentence() -> None:
    made = plan(MODELS["llama 70B"], [Room("cuda0", 8 * GiB, 8 * GiB)], Options(ALL))
    assert 0 < made.n_gpu_layers < 20
    assert made.notes == [
        f"81 layers do not fit into the GPU's memory (--ngl): {made.n_gpu_layers} do, the rest of "
        "the model runs on the CPU."
    ]


def test_experts_leave_the_gpu_before_layers_do() -> None:
    sizes = MODELS["qwen3-30b-a3b"]
    made = plan(sizes, [Room("cuda0", 8 * GiB, 8 * GiB)])
    assert made.places == ["cuda0"] * 49
    away = [name for name, place in made.matrices.items() if place == CPU]
    assert away and all("_exps" in name for name in away)
    assert "blk.0.ffn_up_exps.weight" in away and "blk.47.ffn_up_exps.weight" not in away


def test_cpu_moe_keeps_experts_of_the_first_layers() -> None:
    sizes, room = MODELS["qwen3-30b-a3b"], Room("cuda0", 80 * GiB, 80 * GiB)
    made = plan(sizes, [room], Options(n_cpu_moe=2))
    names = ("down", "gate", "up")
    assert made.matrices == {
        f"blk.{i}.ffn_{n}_exps.weight": CPU for i in range(2) for n in names
    }  # fmt: skip
    assert made.taken["cuda0"].total == sizes.total - 2 * sizes.layers[0].experts


def test_overrides_send_matrices_elsewhere_and_the_first_match_wins() -> None:
    sizes = MODELS["llama 8B"]
    rooms = [Room("cuda0", 80 * GiB, 80 * GiB), Room("cuda1", 80 * GiB, 80 * GiB)]
    made = plan(sizes, rooms, Options(overrides=(
        (r"blk\.3\.ffn_up", "cuda0"), (r"ffn_up|attn_q", CPU))))  # fmt: skip
    assert made.place_of(3, "blk.3.ffn_up.weight") == "cuda0"
    assert made.place_of(4, "blk.4.ffn_up.weight") == CPU
    assert made.place_of(4, "blk.4.ffn_gate.weight") == "cuda1"
    alone = plan(sizes, rooms, Options(0, overrides=((r"blk\.3\.ffn_up", "cuda0"),)))
    assert not alone.uses_device  # nothing is on a GPU with --ngl 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"overrides": (("ffn", "cuda7"),)}, "there is no cuda7; there is cpu, cuda0"),
        ({"overrides": (("ffn(", "cpu"),)}, "no regular expression"),
        ({"overrides": (("nothing", "cpu"),)}, "no matrix of the model is called so"),
        ({"tensor_split": (1.0, 2.0)}, "--tensor-split has 2 shares, and there are 1 GPUs"),
        ({"tensor_split": (0.0,)}, "not all 0"),
        ({"tensor_split": (math.nan, 1)}, "tensor_split must be shares"),
        ({"tensor_split": 3}, "tensor_split must be shares"),
        ({"n_gpu_layers": "all"}, "n_gpu_layers must be a number"),
        ({"n_gpu_layers": True}, "n_gpu_layers must be a number"),
        ({"stream": "often"}, "stream must be auto, on or off"),
        ({"fit_margin": -1}, "fit_margin must be a number"),
        ({"overrides": ("ffn=cpu",)}, "overrides must be a tuple of (pattern, place)"),
    ],
)
def test_what_is_not_there_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OffloadError, match=".") as error:
        plan(MODELS["llama 8B"], [Room("cuda0", GiB, GiB)], Options(**options))
    assert said in str(error.value)


def test_layers_without_kernels_stay_on_the_cpu_and_say_why() -> None:
    whole = MODELS["qwen2.5 1.5B"]
    layers = tuple(
        Layer(x.matrices, x.kv, x.other, "conv1d has no GPU kernel" if i % 4 != 3 else "")
        for i, x in enumerate(whole.layers)
    )
    sizes = Sizes(layers, whole.output, whole.workspace)
    made = plan(sizes, [Room("cuda0", 80 * GiB, 80 * GiB)])
    assert [i for i, p in enumerate(made.places) if p != CPU] == [*range(3, 28, 4), 28]
    assert made.notes == [
        "Layers 0-2, 4-6, 8-10, 12-14, 16-18, 20-22, 24-26 stay on the CPU: "
        "conv1d has no GPU kernel."
    ]


def test_a_gpu_that_is_full_is_not_used_and_the_report_says_so() -> None:
    made = plan(MODELS["llama 8B"], [Room("cuda0", 100 * MiB, 24 * GiB)])
    assert not made.uses_device
    assert made.notes[0].startswith("cuda0 is not used: 104.9 MB are free, of which 0.0 MB")


def test_shares_of_several_gpus() -> None:
    sizes = MODELS["llama 8B"]
    rooms = [Room("cuda0", 80 * GiB, 80 * GiB), Room("cuda1", 80 * GiB, 80 * GiB)]
    made = plan(sizes, rooms, Options(tensor_split=(3, 1)))
    assert made.places.count("cuda0") == 25 and made.places.count("cuda1") == 8
