"""Tests of the CPU kernels for the target of this process; test_targets runs them for each."""

from __future__ import annotations

import ctypes
from pathlib import Path

import architectures
import gguf
import numpy as np
import pytest
import tiny
from loaded import loader
from numpy.typing import NDArray
from samples import nmse, random_rows

from edgellm.kernels import reference
from edgellm.kernels.cpu import activations, linear, targets
from edgellm.kernels.cpu.decode import decode_block
from edgellm.kernels.cpu.store import EmitKernel, KernelStore
from edgellm.kernels.cpu.vector import Emitter, Value
from edgellm.kernels.cpu.weights import PackedWeights, decode_kernel, linear_kernel
from edgellm.kernels.graph import Weight
from edgellm.models import build_graph
from edgellm.quant import TYPES, by_name
from edgellm.quant.gguf import GGUF

TARGET = targets.current()
STORE = KernelStore()
KERNEL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)


def run(name: str, emit: EmitKernel, args: list[int], lo: int, hi: int) -> None:
    block = np.array(args, np.int64)
    KERNEL(STORE.get(name, emit))(block.ctypes.data, lo, hi, 0)


def map_floats(name: str, function: str, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """An emitter's function over an array, by one compiled kernel."""
    out = np.empty_like(x)

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        source, target = e.arguments(args, 2)
        with e.loop(hi, lo, step=e.lanes) as i:
            e.store(getattr(e, function)(e.f32(source + i * 4)), target + i * 4)

    assert len(x) % 16 == 0
    run(f"test_{name}", emit, [x.ctypes.data, out.ctypes.data], 0, len(x))
    return out


# ---- primitives ---------------------------------------------------------------------------------


def test_every_half_widens_as_numpy_does() -> None:
    halves = np.arange(65536, dtype=np.uint16)
    out = np.empty(65536, np.float32)

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        source, target = e.arguments(args, 2)
        with e.loop(hi, lo, step=e.lanes) as i:
            e.store(e.load_f16(source + i * 2, e.lanes), target + i * 4)

    run("test_load_f16", emit, [halves.ctypes.data, out.ctypes.data], 0, 65536)
    expected = halves.view(np.float16).astype(np.float32)
    assert np.array_equal(np.isnan(out), np.isnan(expected))
    numbers = ~np.isnan(expected)
    assert np.array_equal(out[numbers].view(np.uint32), expected[numbers].view(np.uint32))


def test_floats_narrow_to_half_as_numpy_does() -> None:
    rng = np.random.default_rng(0)
    exact = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    exact = exact[np.isfinite(exact)]
    ties = (exact[:-1] + exact[1:]) / 2  # halfway between neighbours: to even
    near = np.concatenate(
        [np.nextafter(ties, np.float32(9e9)), np.nextafter(ties, -np.float32(9e9))]
    )
    edge = np.array(
        [65504, 65519.99, 65520, 65536, 1e9, -1e9, np.inf, -np.inf, 1e-8, 0], np.float32
    )
    x = np.concatenate([exact, ties, near, edge, rng.standard_normal(4096).astype(np.float32)])
    x = np.ascontiguousarray(np.resize(x, len(x) // 16 * 16 + 16))
    out = np.empty(len(x), np.uint16)

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        source, target = e.arguments(args, 2)
        with e.loop(hi, lo, step=e.lanes) as i:
            e.store(e.to_f16(e.f32(source + i * 4)), target + i * 2)

    run("test_to_f16", emit, [x.ctypes.data, out.ctypes.data], 0, len(x))
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16).view(np.uint16)
    assert np.array_equal(out, expected)


def test_exp_is_accurate_and_exact_where_attention_needs_it() -> None:
    x = np.linspace(-86.9, 87, 65536).astype(np.float32)
    out = map_floats("exp", "exp", x)
    assert np.max(np.abs(out / np.exp(x.astype(np.float64)) - 1)) < 3e-7
    special = np.resize(np.array([0, -0.0, -88, -1e30, -np.inf], np.float32), 16)
    values = map_floats("exp", "exp", np.ascontiguousarray(special))
    assert list(values[:5]) == [1, 1, 0, 0, 0]


def test_logarithms_are_accurate() -> None:
    x = np.concatenate([np.geomspace(1e-30, 1e30, 65520), np.ones(16)]).astype(np.float32)
    exact = np.log(x.astype(np.float64))
    assert np.max(np.abs(map_floats("log", "log", x) - exact) / np.maximum(np.abs(exact), 1)) < 3e-7
    assert np.all(map_floats("log", "log", x)[-16:] == 0)
    small = np.concatenate([np.zeros(16), np.geomspace(1e-38, 10, 65520)]).astype(np.float32)
    exact = np.log1p(small.astype(np.float64))
    found = map_floats("log1p", "log1p", small)
    assert np.all(np.abs(found - exact) <= 4e-7 * exact)


def test_tanh_and_rint() -> None:
    x = np.linspace(-12, 12, 4096).astype(np.float32)
    assert np.max(np.abs(map_floats("tanh", "tanh", x) - np.tanh(x))) < 3e-7
    y = np.resize(np.array([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -126.5, 3.2], np.float32), 16)
    assert np.array_equal(map_floats("rint", "rint", np.ascontiguousarray(y)), np.rint(y))


def test_reductions_use_every_lane() -> None:
    x = np.random.default_rng(1).standard_normal(16).astype(np.float32)
    out = map_floats("sum", "sum", x)
    for start in range(0, 16, TARGET.lanes):
        part = slice(start, start + TARGET.lanes)
        assert np.allclose(out[part], x[part].sum(), rtol=1e-6)
        assert len(set(out[part])) == 1
    assert np.array_equal(map_floats("max", "max", x)[: TARGET.lanes],
                          np.full(TARGET.lanes, x[: TARGET.lanes].max()))  # fmt: skip


# ---- number formats -----------------------------------------------------------------------------


NAMES = [t.name for t in TYPES.values()]


@pytest.mark.parametrize("name", NAMES)
def test_traced_decode_equals_numpy_bit_for_bit(name: str) -> None:
    kind = by_name(name)
    rows = random_rows(name, 1, 32 * kind.block if kind.block > 1 else 64, 3)
    n_blocks = rows.size // kind.bytes
    out = np.empty((n_blocks, kind.block), np.float32)

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        source, target = e.arguments(args, 2)
        with e.loop(hi, lo) as i:
            at = 0
            for chunk in decode_block(e, kind, source + i * kind.bytes):
                e.store(chunk, target + i * (4 * kind.block) + 4 * at)
                at += chunk.n

    run(f"test_decode_{name}", emit, [rows.ctypes.data, out.ctypes.data], 0, n_blocks)
    expected = kind.dequantize(rows.reshape(1, -1))
    assert np.array_equal(out.reshape(-1).view(np.uint32), expected.reshape(-1).view(np.uint32))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("n_rows", "n"), [(6, 256), (40, 768)])
@pytest.mark.parametrize("how", ["packed", "precise", "decode"])
def test_linear_against_numpy_and_bitwise_in_every_width(
    name: str, n_rows: int, n: int, how: str
) -> None:
    kind, precise = by_name(name), how == "precise"
    kernel = linear_kernel(kind, TARGET, precise)
    if how == "decode":
        if kind.block == 1:
            pytest.skip("floats are not decoded")
        kernel = decode_kernel(kind, TARGET)
    rows = np.ascontiguousarray(random_rows(name, n_rows, n, n_rows))
    weight = Weight("w", kind, (n, n_rows))

    def read(w: Weight, start: int, out: NDArray[np.uint8]) -> None:
        out[:] = rows.reshape(-1)[start : start + len(out)]

    packed = PackedWeights([weight], read, STORE, TARGET, 2)
    padded = np.zeros((n_rows + TARGET.lanes, rows.shape[1]), np.uint8)  # as the file has them
    padded[:n_rows] = rows
    rng = np.random.default_rng(4)
    x = (rng.standard_normal((75, n)) * rng.uniform(0, 3, (75, 1))).astype(np.float32)
    x[7], x[8], x[9] = 0, 2.5, np.resize([3, 3, -3, -3], n)
    x[10, ::5], x[11, :16], x[12], x[13] = 40, 1e4, 1e-39, np.resize([3e-38, 0], n)
    form = kernel.activation
    acts = x.view(np.uint8)
    if form is not activations.PLAIN:
        acts = np.zeros((75, form.row_bytes(n)), np.uint8)
        args = [x.ctypes.data, x.strides[0], acts.ctypes.data, acts.strides[0], n // form.span]
        run(f"quantize_{form.name}", activations.make_quantize(form), args, 0, 75)
    n_blocks, n_groups = n // kernel.tile.block, kernel.n_groups(weight, TARGET.lanes)
    bias = rng.standard_normal(n_groups * TARGET.lanes).astype(np.float32)
    expected = activations.quantized(x, form) @ kind.dequantize(rows).T + bias[:n_rows]
    if precise:
        assert nmse(activations.quantized(x, form), x) < 3e-8
    whole = None
    for n_tokens in (75, 1, 2, 3, 4, 5, 6, 7, 8, 9, 33, 40):
        out = np.full((n_tokens, n_groups * TARGET.lanes), np.nan, np.float32)
        count = np.array([n_tokens], np.int64)
        address = padded.ctypes.data if how == "decode" else packed.address(weight)
        args = [address, acts.ctypes.data, out.ctypes.data, n_blocks,
                acts.strides[0], out.strides[0], bias.ctypes.data, n_groups, 2,
                kernel.group_bytes(weight, TARGET.lanes), count.ctypes.data]  # fmt: skip
        run(kernel.name, linear.make_linear(kernel.tile), args, 0, -(-n_groups // 2))
        whole = out if whole is None else whole
        assert nmse(out[:, :n_rows], expected[:n_tokens]) < (1e-9 if precise else 1e-10)
        assert np.array_equal(out[:, :n_rows], whole[:n_tokens, :n_rows]), n_tokens


def test_packed_weights_are_no_larger_than_the_files() -> None:
    for name in NAMES:
        kind = by_name(name)
        weight = Weight("w", kind, (512, 64))
        size = linear_kernel(kind, TARGET).matrix_bytes(weight, TARGET.lanes)
        assert size == kind.row_bytes(512) * 64


# ---- whole models -------------------------------------------------------------------------------


def logits_and_reference(  # type: ignore[no-untyped-def]
    path: Path, tokens: NDArray[np.int64], types: tuple[str, str] | None = None
):
    """With keys and values in ``types``; else in f16, and the specification keeps float32."""
    from edgellm import LLM

    type_k, type_v = types or ("f16", "f16")
    with LLM(path, n_ctx=512, n_threads=2, type_k=type_k, type_v=type_v) as llm:
        found = llm.logits(tokens.tolist())
    with GGUF(path) as file:
        _, graph = build_graph(file)
        load = loader(file)
        return found, reference.run(graph, tokens, load, 512, *(types or ()))


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
@pytest.mark.parametrize("seed", [1, 2])
def test_tiny_models_agree_with_the_reference(tiny_model, architecture: str, seed: int) -> None:  # type: ignore[no-untyped-def]
    shape = {"n_heads": 2, "n_kv_heads": 1, "head_dim": 64, "n_embd": 256} if seed == 2 else {}
    path = tiny_model(architecture, seed=seed, tied=seed == 2, **shape)
    tokens = np.random.default_rng(seed).integers(0, 258, 150)
    found, expected = logits_and_reference(path, tokens)
    # a flipped choice of an expert moves the figure
    assert nmse(found, expected) < (3e-3 if architecture.endswith("moe") else 1e-3)


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_every_op_agrees_with_the_reference_on_its_own_inputs(  # type: ignore[no-untyped-def]
    tiny_model, architecture: str, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    from edgellm import LLM, SamplingParams

    monkeypatch.setenv("EDGELLM_TRACE", "ops")
    with LLM(tiny_model(architecture), n_ctx=512, n_threads=2) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        llm.generate([list(range(1, 90)), [5], list(range(40, 50))], greedy)
        llm.logits(list(range(250)) + list(range(90)))
    assert "agree with the reference" in capfd.readouterr().err


@pytest.mark.parametrize("name", architectures.TINY)
def test_every_op_of_every_architecture_agrees_with_the_reference(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from edgellm import LLM, SamplingParams

    monkeypatch.setenv("EDGELLM_TRACE", "ops")
    with LLM(architectures.write(tmp_path / "model.gguf", name), n_ctx=512, n_threads=2) as llm:
        if name.endswith("bert"):
            llm.embed([list(range(90)), [5], list(range(96)) * 3])
        else:
            greedy = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
            llm.generate([list(range(1, 90)), [5], list(range(40, 50))], greedy)
            llm.logits(list(range(96)) * 4)
    assert "agree with the reference" in capfd.readouterr().err


def test_every_number_format_in_matrices_and_stacked_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Seven matrices a layer, three of them experts, take the formats in turn."""
    from edgellm import LLM

    def quantize(values: NDArray[np.float32], kind: gguf.GGMLQuantizationType) -> NDArray[np.uint8]:
        rows = random_rows(kind.name.lower(), values[..., 0].size, values.shape[-1], kind)
        return rows.reshape(*values.shape[:-1], -1)

    monkeypatch.setattr(architectures, "quantize", quantize)
    monkeypatch.setenv("EDGELLM_TRACE", "ops")
    kinds = tuple(gguf.GGMLQuantizationType(t.id) for t in TYPES.values() if t.name != "f32")
    path = architectures.write(
        tmp_path / "model.gguf", "llama-moe", types=kinds, block_count=10, embedding_length=256,
        feed_forward_length=256, attention__key_length=64, attention__value_length=64,
        rope__dimension_count=64,
    )  # fmt: skip
    with GGUF(path) as file:
        stacked = {t.type.name for t in file.tensors.values() if len(t.shape) == 3}
    assert stacked == set(NAMES) - {"f32"}
    with LLM(path, n_ctx=256, n_threads=2) as llm:
        llm.logits(list(range(40)))
    assert "agree with the reference" in capfd.readouterr().err


DATA = Path(__file__).parent.parent / "data/arch"


@pytest.mark.parametrize("name", sorted(p.stem for p in DATA.glob("*.gguf")))
def test_small_models_agree_with_llama_cpp(name: str) -> None:
    """Expected values of tests/oracle.py: llama.cpp in float32."""
    from edgellm import LLM

    stored = np.load(DATA / f"{name}.npz")
    tokens = stored["tokens"].astype(np.int64)
    if "logits" in stored:
        found, exact = logits_and_reference(DATA / f"{name}.gguf", tokens)
        assert nmse(exact, stored["logits"]) <= 1e-8
        with GGUF(DATA / f"{name}.gguf") as file:  # one flipped choice moves the figure
            has_experts = any("_exps" in tensor for tensor in file.tensors)
        assert nmse(found, stored["logits"]) <= (1e-2 if has_experts else 1e-3)
        return
    mean = stored["embeddings"].mean(axis=0)
    with LLM(DATA / f"{name}.gguf", n_threads=2) as llm:
        assert nmse(llm.embed(tokens.tolist()), mean / np.linalg.norm(mean)) <= 1e-4


GOLDEN = (
    "cohere2-dense", "deepseek2-moe", "gemma-dense", "gemma2-dense", "gemma3-dense", "glm4-dense",
    "gpt-oss-moe", "gpt2-dense", "granite-dense", "lfm2-dense", "llama-dense", "llama-moe",
    "mistral3-dense", "olmo2-dense", "phi2-dense", "phi3-dense", "qwen2-dense", "qwen2moe-moe",
    "qwen3-dense", "qwen35-dense", "qwen3moe-moe", "smollm3-dense", "stablelm-dense",
    "starcoder2-dense",
)  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_logits(name: str, vectors: Path) -> None:
    folder = vectors / "golden/arch"
    expected = np.load(folder / f"{name}.npz")
    found, exact = logits_and_reference(
        folder / f"{name}.gguf", expected["tokens"].astype(np.int64)
    )
    assert nmse(exact, expected["logits"]) <= 1e-8
    table = dict(
        line.split("\t")[:2] for line in (folder / "reference.tsv").read_text().splitlines()
    )
    bar = float(table[name]) * (3 if name.endswith("-moe") else 1.1)
    assert nmse(found, expected["logits"]) <= bar
