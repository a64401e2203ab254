"""Matrices of every type against dequantized weights times the same activations in float64.

The tolerance: int8 products are exact, and float32 sums of n_in / 32 scaled groups in a fixed order
err by less than 1e-6 of the sum of the terms' sizes.
"""

import numpy as np
import pytest
from on_device import as_taken, floats, get, matrix, put, quantized, rows
from samples import random_rows

from edgellm.kernels.cuda import operations, pack
from edgellm.kernels.cuda.device import ALIGNMENT
from edgellm.kernels.cuda.quantized import row_bytes
from edgellm.quant import by_name

TOLERANCE = 1e-6


def weights_of(kind: str, n_out: int, n_in: int, seed: int = 0):
    """Rows of the file, and their numbers by the number format's definition (quant/)."""
    packed = random_rows(kind, n_out, n_in, seed)
    return packed, by_name(kind).dequantize(packed).astype(np.float64)


def close(found, expected, sizes) -> bool:
    return bool((np.abs(found - expected) <= TOLERANCE * sizes + 1e-30).all())


@pytest.mark.parametrize("kind", pack.TYPES)
def test_packed_weights_are_no_larger_than_the_files(kind):
    of = by_name(kind)
    n = pack.packed_bytes(of, 512, 77)
    assert 0 <= n - 77 * of.row_bytes(512) < 5 * ALIGNMENT


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("kind", pack.TYPES)
def test_a_matrix_times_rows(devices, kind, phase):
    n_in, n_out = 256 * 5, 13 if phase == "decode" else 133
    packed, numbers = weights_of(kind, n_out, n_in)
    rng = np.random.default_rng(1)
    x, bias = rng.standard_normal((67, n_in), np.float32), rng.standard_normal(n_out, np.float32)
    counts = (1, 2, 3, 8, 11) if phase == "decode" else (1, 67)
    for device in devices:
        w = matrix(device, kind, [packed], n_in)
        alone: dict[int, np.ndarray] = {}
        for n in counts:
            count = rows(device, n, limit=n + 2)
            taken, seen = as_taken(device, w, x[:n], count)
            out = put(device, np.full((n + 2, n_out), 7))
            operations.linear(device, w, taken, out, count, phase, put(device, bias))
            found = get(device, out, n + 2, n_out)
            assert close(found[:n], seen @ numbers.T + bias, np.abs(seen) @ np.abs(numbers.T) + 1)
            assert (found[n:] == 7).all()  # rows that are not there stay as they are
            for i in range(n):  # bit for bit, whatever the company
                assert np.array_equal(alone.setdefault(i, found[i]), found[i])


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize(("kind", "n_in"), [("q8_0", 32), ("q4_0", 96), ("f16", 24)])
def test_short_rows(devices, kind, n_in, phase):
    packed, numbers = weights_of(kind, 5, n_in)
    x = np.random.default_rng(2).standard_normal((3, n_in), np.float32)
    for device in devices:
        w, count = matrix(device, kind, [packed], n_in), rows(device, 3)
        taken, seen = as_taken(device, w, x, count)
        out = floats(device, 3, 5)
        operations.linear(device, w, taken, out, count, phase)
        found = get(device, out, 3, 5)
        assert close(found, seen @ numbers.T, np.abs(seen) @ np.abs(numbers.T))


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("kind", ["q4_k", "q8_0"])
def test_outliers_keep_15_bits(devices, kind, phase):
    n_in = 512
    packed, numbers = weights_of(kind, 20, n_in)
    x = np.random.default_rng(3).standard_normal((3, n_in), np.float32)
    x[:, ::32] *= 300
    exact = x.astype(np.float64) @ numbers.T
    for device in devices:
        w, count = matrix(device, kind, [packed], n_in, precise=True), rows(device, 3)
        taken, seen = as_taken(device, w, x, count)
        out = floats(device, 3, 20)
        operations.linear(device, w, taken, out, count, phase)
        found = get(device, out, 3, 20)
        sizes = np.abs(x) @ np.abs(numbers.T)
        assert close(found, seen @ numbers.T, sizes)
        assert np.abs(found - exact).max() < np.abs(quantized(x) @ numbers.T - exact).max() / 50


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("kind", ["q6_k", "q5_1", "bf16"])
def test_each_head_has_its_matrix(devices, kind, phase):
    n_in, n_out, heads = 256, 40, 3
    parts = [weights_of(kind, n_out, n_in, seed) for seed in range(heads)]
    x = np.random.default_rng(4).standard_normal((5, heads * n_in), np.float32)
    for device in devices:
        w, count = matrix(device, kind, [p for p, _ in parts], n_in), rows(device, 5)
        taken, seen = as_taken(device, w, x, count)
        out = floats(device, 5, heads * n_out)
        operations.linear(device, w, taken, out, count, phase)
        by_head = seen.reshape(5, heads, n_in)
        numbers = np.stack([w for _, w in parts])
        expected = np.einsum("nhi,hoi->nho", by_head, numbers).reshape(5, -1)
        sizes = np.einsum("nhi,hoi->nho", np.abs(by_head), np.abs(numbers)).reshape(5, -1)
        assert close(get(device, out, 5, heads * n_out), expected, sizes)


@pytest.mark.parametrize("kind", pack.TYPES)
def test_rows_of_a_table(devices, kind):
    packed, numbers = weights_of(kind, 9, 512)
    wanted = [4, 0, 8, 4]
    for device in devices:
        table, out = matrix(device, kind, [packed], 512), floats(device, 4, 512)
        ids = put(device, wanted, np.int32)
        operations.table_rows(device, table, ids, out, rows(device, 4))
        found = get(device, out, 4, 512)
        assert close(found, numbers[wanted], np.abs(numbers).max(axis=1)[wanted][:, None] * 2)


def test_a_row_with_nan_or_infinity_spoils_itself_only(devices):
    packed, numbers = weights_of("q4_k", 6, 256)
    x = np.random.default_rng(5).standard_normal((4, 256), np.float32)
    x[1, 40], x[2, 200] = np.nan, np.inf
    for device in devices:
        w, count = matrix(device, "q4_k", [packed], 256), rows(device, 4)
        taken = device.alloc(4 * row_bytes(256))
        operations.quantize(device, put(device, x), taken, count, 256)
        for phase in ("decode", "prefill"):
            out = floats(device, 4, 6)
            operations.linear(device, w, taken, out, count, phase)
            found = get(device, out, 4, 6)
            assert np.isnan(found[1:3]).all()
            seen = quantized(x[[0, 3]])
            assert close(found[[0, 3]], seen @ numbers.T, np.abs(seen) @ np.abs(numbers.T))


def test_types_and_shapes_without_kernels_are_named():
    with pytest.raises(ValueError, match="IQ2_XS has no GPU kernels; there are q8_0"):
        pack.packed_bytes(by_name("iq2_xs"), 256, 4)
    with pytest.raises(ValueError, match="multiple of 8"):
        pack.packed_bytes(by_name("f32"), 20, 4)


@pytest.mark.parametrize("function", operations.GATES)
@pytest.mark.parametrize("n", [1, 5])
def test_a_gate_at_once_has_the_bits_of_one_after_the_other(devices, function, n):
    n_in, n_out = 1280, 7
    parts = [weights_of("q5_k", n_out, n_in, seed) for seed in (1, 2)]
    rng = np.random.default_rng(6)
    x, bias = rng.standard_normal((n, n_in), np.float32), rng.standard_normal(n_out, np.float32)
    for device in devices:
        gate, up = (matrix(device, "q5_k", [p], n_in) for p, _ in parts)
        assert operations.can_gate(gate, up)
        count = rows(device, n)
        taken, _ = as_taken(device, gate, x, count)
        both, out = [floats(device, n, n_out) for _ in range(3)], floats(device, n, n_out)
        operations.linear(device, gate, taken, both[0], count, "decode", put(device, bias))
        operations.linear(device, up, taken, both[1], count, "decode")
        operations.binary(device, function, *both, count, n_out)
        operations.gated(device, function, gate, up, taken, out, count, put(device, bias))
        assert np.array_equal(get(device, out, n, n_out), get(device, both[2], n, n_out))


def test_what_is_not_alike_is_not_gated(devices):
    device = devices[0]
    gate = matrix(device, "q4_k", [weights_of("q4_k", 4, 256)[0]], 256)
    for kind, precise in (("q6_k", False), ("q4_k", True), ("f16", False)):
        up = matrix(device, kind, [weights_of(kind, 4, 256)[0]], 256, precise)
        assert not operations.can_gate(gate, up) and not operations.can_gate(up, gate)
