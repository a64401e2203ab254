"""Tests of the fast encoders for the target of this process; test_targets runs them for each."""

from __future__ import annotations

import numpy as np
import pytest
import weight_rows
from numpy.typing import NDArray
from samples import random_rows

from edgellm.kernels.cpu.convert import Converter
from edgellm.kernels.cpu.store import KernelStore
from edgellm.quant import TYPES, by_name
from edgellm.quant.block import UnencodableError

STORE = KernelStore()
F32 = by_name("f32")
TARGETS = ("f16", "bf16", *weight_rows.NAMES)
each_target = pytest.mark.parametrize("name", TARGETS)
WEIGHTS = weight_rows.importances()


@pytest.fixture(scope="module")
def converter():  # type: ignore[no-untyped-def]
    with Converter(2, STORE) as found:
        yield found


def hard_rows() -> NDArray[np.float32]:
    """Ordinary rows, and what scales and rounding have to get right; 3 more than lanes divide."""
    rows = np.concatenate([sample[:16] for sample in weight_rows.samples().values()])
    rows = np.concatenate([rows, rows[:3]])
    rows[1] = 0
    rows[2, :300], rows[3] = 1, -0.0
    rows[4] *= 1e-6  # scales that are subnormal halves
    rows[5] *= 1e-40
    rows[6] = np.round(rows[6] * 200) / 2  # many halves
    rows[7] = np.where(np.arange(rows.shape[1]) % 3, 65504, -65504)
    rows[8, 5] = 30000
    return rows


@each_target
@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
def test_encoders_give_the_bits_of_the_specification(
    converter: Converter, name: str, is_weighted: bool
) -> None:
    kind, rows, weights = by_name(name), hard_rows(), WEIGHTS if is_weighted else None
    found = converter.convert(rows.view(np.uint8), F32, kind, weights)
    assert np.array_equal(found, kind.quantize(rows, weights))


@pytest.mark.parametrize("source", TYPES.values(), ids=str)
def test_every_format_is_decoded_as_the_specification_decodes(converter: Converter, source) -> None:  # type: ignore[no-untyped-def]
    data = random_rows(source.name, 40, 512, 1)
    want = source.dequantize(data)
    assert np.array_equal(converter.convert(data, source, F32), want.view(np.uint8))
    target = by_name("q8_0" if source.name != "q8_0" else "q4_0")
    assert np.array_equal(converter.convert(data, source, target), target.quantize(want))


@pytest.mark.parametrize("name", ["f16", "q8_0", "q4_0", "q4_k"])
def test_any_number_of_rows_and_threads(name: str) -> None:
    kind, half = by_name(name), by_name("f16")
    rng = np.random.default_rng(5)
    for shape in ((0, 256), (1, 256), (3, 256), (5, 768), (17, 256), (700, 512), (2, 1 << 18)):
        data = half.quantize(rng.standard_normal(shape).astype(np.float32))
        weights = rng.random(shape[1]).astype(np.float32)
        want = None
        for n_threads in (1, 3):
            with Converter(n_threads, STORE) as converter:
                found = converter.convert(data, half, kind, weights)
            want = found if want is None else want
            assert np.array_equal(found, want)
        few = slice(0, 5)
        head = kind.quantize(half.dequantize(data[few]), weights) if kind != half else data[few]
        assert want is not None and np.array_equal(want[few], head)


def test_short_rows(converter: Converter) -> None:
    """Fewer elements or blocks than a vector has lanes."""
    for name, n in (("f16", 3), ("bf16", 1), ("q8_0", 32), ("q5_1", 64)):
        kind, rows = by_name(name), np.linspace(-2, 3, n, dtype=np.float32)[None]
        found = converter.convert(rows.view(np.uint8), F32, kind)
        assert np.array_equal(found, kind.quantize(rows))
        assert np.array_equal(converter.convert(found, kind, F32).view(np.float32),
                              kind.dequantize(found))  # fmt: skip


def test_room_that_is_given_is_used(converter: Converter) -> None:
    kind, rows = by_name("q4_0"), weight_rows.samples()["gaussian"]
    out = np.empty((len(rows), kind.row_bytes(rows.shape[1])), np.uint8)
    assert converter.convert(rows.view(np.uint8), F32, kind, out=out) is out
    assert np.array_equal(out, kind.quantize(rows))
    same = np.empty_like(out)
    converter.convert(out, kind, kind, out=same)
    assert np.array_equal(out, same)


def test_what_does_not_fit_is_refused(converter: Converter) -> None:
    rows = np.ones((40, 4096), np.float32)
    data, kind = rows.view(np.uint8), by_name("q4_k")
    with pytest.raises(ValueError, match="Q4_K: 5 weights of importance for 4096 columns"):
        converter.convert(data, F32, kind, np.ones(5, np.float32))
    with pytest.raises(ValueError, match="do not fit into"):
        converter.convert(data, F32, kind, out=np.empty((40, 3), np.uint8))
    with pytest.raises(ValueError, match="Q4_0: .* no rows of whole blocks"):
        converter.convert(data[:, :5], by_name("q4_0"), kind)
    with pytest.raises(ValueError, match="Q4_K: 32 elements are no whole number of blocks"):
        converter.convert(rows[:, :32].copy().view(np.uint8), F32, kind)
    with pytest.raises(TypeError, match="IQ2_S has no encoder"):
        converter.convert(data, F32, by_name("iq2_s"))
    rows[39, 7] = np.nan
    with pytest.raises(UnencodableError, match="Q4_K cannot hold nan in row 39, column 7"):
        converter.convert(data, F32, kind)
