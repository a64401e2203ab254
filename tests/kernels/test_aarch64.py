"""The AArch64 targets against numpy, on any machine that has Debian's cross compiler and qemu."""

from __future__ import annotations

import re
from pathlib import Path

import cross
import numpy as np
import pytest
import weight_rows
from cross import Call, Machine
from numpy.typing import NDArray
from samples import nmse, random_rows

from edgellm.kernels import reference
from edgellm.kernels.cpu import (
    activations,
    attention,
    elementwise,
    encode,
    linear,
    norms,
    peaks,
)
from edgellm.kernels.cpu.activations import PLAIN
from edgellm.kernels.cpu.arm_features import features_of
from edgellm.kernels.cpu.attention import PIECE, AttentionShape
from edgellm.kernels.cpu.inputs import AttentionGroup, Limits
from edgellm.kernels.cpu.kv_types import BLOCK, kv_type
from edgellm.kernels.cpu.layouts import LAYOUTS
from edgellm.kernels.cpu.targets import TARGETS
from edgellm.kernels.cpu.vector import Emitter, Value
from edgellm.kernels.cpu.weights import decode_kernel, linear_kernel
from edgellm.kernels.graph import Graph, Weight
from edgellm.quant import TYPES, by_name

NAMES = ("neon_i8mm", "neon_dotprod", "generic")

slow = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(cross.missing()), reason=cross.missing()),
]


@pytest.fixture(scope="module", params=NAMES)
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(TARGETS[request.param], tmp_path_factory.mktemp(request.param))


def rows_of(x: NDArray[np.float32], form: activations.Activation) -> tuple[NDArray, list[Call]]:  # type: ignore[type-arg]
    """Activation rows in a form, and the call that fills them."""
    if form is PLAIN:
        return x, []
    out = np.zeros((len(x), form.row_bytes(x.shape[1])), np.uint8)
    args = [x, x.strides[0], out, out.strides[0], x.shape[1] // form.span]
    emit = activations.make_quantize(form)
    return out, [Call(f"quantize_{form.name}", emit, args, 0, len(x))]


@pytest.mark.parametrize("name", [t.name for t in TYPES.values()])
@pytest.mark.parametrize("how", ["packed", "precise", "decode"])
class TestLinear:
    pytestmark = slow

    def test_against_numpy_and_bitwise_in_every_width(
        self, machine: Machine, name: str, how: str
    ) -> None:
        kind, target, n_rows, n = by_name(name), machine.target, 9, 512
        if (how != "packed") if kind.block == 1 else (how != "decode" and name not in LAYOUTS):
            pytest.skip("is the same kernel")
        if how == "decode":
            kernel = decode_kernel(kind, target)
        else:
            kernel = linear_kernel(kind, target, how == "precise")
        weight = Weight("w", kind, (n, n_rows))
        rows = random_rows(name, n_rows, n, 5)
        n_blocks, n_groups = n // kernel.tile.block, kernel.n_groups(weight, target.lanes)
        packed = np.zeros(kernel.matrix_bytes(weight, target.lanes), np.uint8)
        calls = []
        if how == "decode":
            packed[: rows.size] = rows.reshape(-1)
        else:
            emit = (
                linear.make_pack_float(kind) if kind.block == 1 else linear.make_pack(LAYOUTS[name])
            )
            args = [rows, rows.strides[0], n_rows, n_blocks, packed]
            calls.append(Call(f"pack_{name}", emit, args, 0, n_groups))
        x = np.random.default_rng(6).standard_normal((19, n)).astype(np.float32)
        acts, quantize = rows_of(x, kernel.activation)
        calls += quantize
        bias = np.random.default_rng(7).standard_normal(n_groups * target.lanes).astype(np.float32)
        found = {}
        for n_tokens in (19, 1, 2, 3, 5, 8):
            out = np.full((n_tokens, n_groups * target.lanes), np.nan, np.float32)
            found[n_tokens] = out
            args = [packed, acts, out, n_blocks, acts.strides[0], out.strides[0], bias, n_groups,
                    2, kernel.group_bytes(weight, target.lanes), np.array([n_tokens])]  # fmt: skip
            calls.append(
                Call(kernel.name, linear.make_linear(kernel.tile), args, 0, -(-n_groups // 2))
            )
        machine.run(*calls)
        x_read = activations.quantized(x, kernel.activation)
        expected = x_read @ kind.dequantize(rows).T + bias[:n_rows]
        for n_tokens, out in found.items():
            assert nmse(out[:, :n_rows], expected[:n_tokens]) < 1e-10
            assert np.array_equal(out[:, :n_rows], found[19][:n_tokens, :n_rows]), n_tokens


class TestRows:
    pytestmark = slow

    @pytest.mark.parametrize("form", [activations.Q8, activations.Q8K, activations.Q8K.precise()])
    def test_quantize(self, machine: Machine, form: activations.Activation) -> None:
        x = np.random.default_rng(1).standard_normal((3, 512)).astype(np.float32)
        x[1, :128] = 0
        out, calls = rows_of(x, form)
        machine.run(*calls)
        structs = out.reshape(3, -1, form.terms, form.struct_bytes)
        codes = structs[..., : form.span].view(np.int8)
        at = form.span + activations.SCALE
        scales = structs[..., at : at + 4].copy().view(np.float32)
        values = (codes * scales).sum(2).reshape(3, -1)
        assert np.allclose(values, activations.quantized(x, form), rtol=0, atol=2e-6)

    def test_rms_norm(self, machine: Machine) -> None:
        rng = np.random.default_rng(2)
        x = rng.standard_normal((3, 256)).astype(np.float32)
        weight = rng.standard_normal(64).astype(np.float32)
        out = np.zeros_like(x)
        eps = int(np.float32(1e-5).view(np.uint32))
        args = [x, x.strides[0], weight, 0, 0, out, out.strides[0], 4, 64, eps]
        machine.run(Call("rms_norm", norms.make_rms_norm(), args, 0, 3))
        runs = x.reshape(3, 4, 64).astype(np.float64)
        expected = runs / np.sqrt((runs**2).mean(-1, keepdims=True) + 1e-5) * weight
        assert nmse(out, expected.reshape(3, -1)) < 1e-12

    @pytest.mark.parametrize(
        "name", [name for name, of in elementwise.MAPS.items() if not of.n_constants]
    )
    def test_activations(self, machine: Machine, name: str) -> None:
        rng = np.random.default_rng(3)
        inputs = [rng.standard_normal((2, 64)).astype(np.float32) * 4
                  for _ in range(elementwise.MAPS[name].n_inputs)]  # fmt: skip
        out, args = np.zeros((2, 64), np.float32), []
        for x in inputs:
            args += [x, 256]
        machine.run(Call(name, elementwise.make_map(name), [*args, out, 256, 64], 0, 2))
        expected = reference.OPS[name](None, inputs, None)  # type: ignore[arg-type]
        # the reference rounds gelu to halves, as ggml's table does
        assert nmse(out, expected) < (1e-6 if name in ("gelu", "geglu") else 1e-11)

    def test_halves_both_ways(self, machine: Machine) -> None:
        halves = np.arange(65536, dtype=np.uint16)
        finite = np.isfinite(halves.view(np.float16))
        wide, back = np.zeros(65536, np.float32), np.zeros(65536, np.uint16)

        def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
            source, middle, target = e.arguments(args, 3)
            with e.loop(hi, lo, step=e.lanes) as i:
                x = e.load_f16(source + i * 2, e.lanes)
                e.store(x, middle + i * 4)
                e.store(e.to_f16(x), target + i * 2)

        machine.run(Call("halves", emit, [halves, wide, back], 0, 65536))
        assert np.array_equal(wide[finite], halves.view(np.float16).astype(np.float32)[finite])
        assert np.array_equal(back[finite], halves[finite])


@pytest.mark.parametrize("window", [None, 48])
@pytest.mark.parametrize(
    ("k_type", "v_type"),
    [("f16", "f16"), ("f32", "f32"), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("q8_0", "q4_0")],
)
class TestAttention:
    pytestmark = slow

    def test_against_the_reference(
        self, machine: Machine, window: int | None, k_type: str, v_type: str
    ) -> None:
        """A prompt longer than a piece, then one token, whose pieces are merged."""
        n, heads, kv_heads, dim = PIECE + 45, 4, 2, 64
        shape = AttentionShape(
            heads, kv_heads, dim, dim, 0.2, window, kv_type(k_type), kv_type(v_type)
        )
        limits = Limits(1, n, 1, 2, 512, 512 // BLOCK, k_type, v_type)
        group = AttentionGroup(shape, limits, np.zeros(1, np.int64))
        group.add_layer()
        group.table[0] = np.random.default_rng(0).permutation(512 // BLOCK)
        positions = np.arange(n)
        group.slots[:n] = group.table[0][positions // BLOCK] * BLOCK + positions % BLOCK
        rng = np.random.default_rng(4)
        q = rng.standard_normal((n, heads * dim)).astype(np.float32)
        k, v = (rng.standard_normal((n, kv_heads * dim)).astype(np.float32) for _ in range(2))
        out = np.zeros_like(q)
        scratch = np.zeros(shape.scratch_bytes(), np.uint8)
        keys, values = group.keys[0], group.values[0]
        store = [k, k.strides[0], v, v.strides[0], group.slots, keys, values]
        attend = [q, q.strides[0], out, out.strides[0], positions, group.table,
                  group.table.strides[0], keys, values, scratch, scratch.nbytes, group.partials,
                  q, 0]  # fmt: skip
        merge = [out, out.strides[0], group.splits, group.partials, 0]
        calls = [Call("kv_store", attention.make_kv_store(shape), store, 0, n)]
        for run in ((0, n - 1, 0, 0), (n - 1, 1, n - 1, 0)):
            group.plan([run])
            items, splits = group.items.copy(), group.splits.copy()
            count = int(group.count[0])
            make = attention.make_attention(shape)
            calls.append(Call("attend", make, [items, *attend], 0, count))
            merge[2] = splits
            last = attention.make_merge(shape)
            calls.append(Call("merge", last, list(merge), run[0], run[0] + run[1]))
        folder = machine.folder / f"{window}_{k_type}_{v_type}"
        folder.mkdir()
        Machine(machine.target, folder).run(*calls)
        graph = Graph()
        inputs = [
            graph.embed(Weight("e", by_name("f32"), (n_heads * dim, 1)))
            for n_heads in (heads, kv_heads, kv_heads)
        ]
        graph.attention(*inputs, n_heads=heads, n_kv_heads=kv_heads, scale=0.2, window=window)
        step = reference.Step(
            positions,
            positions,
            lambda weight: None,
            type_k=k_type,
            type_v=v_type,  # type: ignore
        )
        for kind, rows, pool, is_keys in (
            (kv_type(k_type), k, keys, True), (kv_type(v_type), v, values, False)
        ):  # fmt: skip
            held = kind.rows(pool.reshape(512 // BLOCK, -1)[group.table[0]], kv_heads, dim, is_keys)
            assert np.array_equal(held[:n], by_name(kind.name).quantize(rows))
        expected = reference.OPS["attention"](graph.ops[-1], [q, k, v], step)
        assert nmse(out, expected) < 1e-11


@pytest.mark.parametrize("name", ["f16", "bf16", *weight_rows.NAMES])
@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
class TestEncode:
    pytestmark = slow

    def test_the_bits_of_the_specification(
        self, machine: Machine, name: str, is_weighted: bool
    ) -> None:
        kind, n = by_name(name), 512
        if kind.block == 1 and is_weighted:
            pytest.skip("plain floats have no weights")
        rows = weight_rows.samples()["outliers"][:6, :n].copy()
        rows[1], rows[2, :40], rows[3] = 0, 1, rows[3] * np.float32(1e-6)
        weights = weight_rows.importances()[:n].copy()
        n_blocks = rows.size // kind.block
        out = np.zeros((n_blocks, kind.bytes), np.uint8)
        steps = -(-n_blocks // machine.target.lanes)
        args = [rows, out, n_blocks, weights, n // kind.block]
        emit = encode.make_encode(kind, is_weighted)
        machine.run(Call(f"encode_{name}_{is_weighted}", emit, args, 0, steps))
        want = kind.quantize(rows, weights if is_weighted else None)
        assert np.array_equal(out, want.reshape(out.shape))


class TestPeaks:
    pytestmark = slow

    def test_loops_of_bench(self, machine: Machine) -> None:
        data = np.random.default_rng(0).integers(0, 256, 1 << 16, dtype=np.uint8)
        sink, dots = np.zeros(64, np.uint8), np.zeros(16, np.int32)
        machine.run(
            Call("peak_read", peaks.make_read(), [data, sink], 0, 1),
            Call("peak_dot", peaks.make_dot(), [10, dots], 0, 2),
        )
        assert np.array_equal(sink[:16], np.bitwise_xor.reduce(data.reshape(-1, 16), axis=0))
        products = 4 * peaks._n_sums(machine.target) * peaks._A_TURN * 20
        assert list(dots[:4]) == [3 * 5 * products] * 4


# ---- without an emulator ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "there", "absent"),
    [("neon_i8mm", "usdot", "smull"), ("neon_dotprod", "sdot", "usdot")],
)
def test_kernels_compile_to_their_instructions(
    tmp_path: Path, name: str, there: str, absent: str
) -> None:
    target = TARGETS[name]
    kernel = linear_kernel(by_name("q4_k"), target)
    text = Machine(target, tmp_path).assembly(linear.make_linear(kernel.tile))
    assert re.search(rf"\b{there}\b", text) and not re.search(rf"\b{absent}\b", text)


def test_features_are_bits_of_the_auxiliary_vector() -> None:
    assert features_of(1 << 1 | 1 << 20, 1 << 13) == {"neon": True, "dotprod": True, "i8mm": True}
    assert features_of(1 << 1 | 1 << 2, 0) == {"neon": True}
    assert features_of(0, 0) == {}
