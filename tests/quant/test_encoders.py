"""Encoders: as exact as ggml's at least, finite for what a format holds, read by everybody."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import weight_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from edgellm.quant import by_name
from edgellm.quant.block import UnencodableError, check_encodable

NAMES = weight_rows.NAMES
GGML = json.loads(weight_rows.ERRORS.read_text())
SAMPLES = weight_rows.samples()
WEIGHTS = weight_rows.importances()
# The largest root mean square error of a block in units of its elements' span: half a step, then
# what the rounding of scales and of minimums adds.
STEPS = {
    "q8_0": 1 / 254, "q4_0": 1 / 15, "q4_1": 1 / 30, "q5_0": 1 / 31, "q5_1": 1 / 62,
    "q2_k": 1 / 6 + 2 / 15, "q3_k": 1 / 7 + 1 / 31, "q4_k": 1 / 30 + 2 / 63,
    "q5_k": 1 / 62 + 2 / 63, "q6_k": 1 / 63 + 1 / 127, "iq4_nl": 1 / 14,
    "iq4_xs": 1 / 14 + 1 / 31, "mxfp4": 1 / 5,
}  # fmt: skip
each_type = pytest.mark.parametrize("name", NAMES)


@each_type
@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
def test_the_error_is_at_most_ggmls(name: str, sample: str, is_weighted: bool) -> None:
    kind, rows, weights = by_name(name), SAMPLES[sample], WEIGHTS if is_weighted else None
    found = weight_rows.error(rows, kind, kind.quantize(rows, weights), weights)
    assert found <= 1.01 * GGML[name][sample][is_weighted]


@each_type
def test_the_recorded_errors_are_ggmls(name: str) -> None:
    pytest.importorskip("llama_cpp")
    import ggml

    for sample, rows in SAMPLES.items():
        for weights, recorded in zip((None, WEIGHTS), GGML[name][sample], strict=True):
            encoded = ggml.quantize(by_name(name), rows, weights)
            now = weight_rows.error(rows, by_name(name), encoded, weights)
            assert now == pytest.approx(recorded, rel=0.005)


@each_type
def test_gguf_py_decodes_what_was_encoded(name: str) -> None:
    kind = by_name(name)
    for weights in (None, WEIGHTS):
        encoded = kind.quantize(SAMPLES["student"], weights)
        other = gguf.dequantize(encoded, gguf.GGMLQuantizationType(kind.id))
        assert np.array_equal(kind.dequantize(encoded), other)


def span(blocks: NDArray[np.float32]) -> NDArray[np.float64]:
    """From the smallest to the largest element of each block, with zero between them."""
    x = blocks.astype(np.float64)
    return np.maximum(x.max(axis=1), 0) - np.minimum(x.min(axis=1), 0)


def finite_rows(n: int) -> st.SearchStrategy[NDArray[np.float32]]:
    """Two rows: all of any size, or of one size with a few of any."""
    anything = st.floats(-65504, 65504, width=32)
    sizes = st.sampled_from([1e-42, 1e-30, 1e-7, 1e-3, 1.0, 1e4])

    def drawn(seed: int, size: float, others: dict[int, float]) -> NDArray[np.float32]:
        rows = np.random.default_rng(seed).uniform(-size, size, 2 * n).astype(np.float32)
        for place, value in others.items():
            rows[place] = value
        return rows.reshape(2, n)

    some = st.dictionaries(st.integers(0, 2 * n - 1), anything, max_size=8)
    mixed = st.builds(drawn, st.integers(0, 9), sizes, some)
    return st.one_of(mixed, hnp.arrays(np.float32, (2, n), elements=anything))


@each_type
@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_any_finite_rows(name: str, is_weighted: bool, data: st.DataObject) -> None:
    kind = by_name(name)
    rows = data.draw(finite_rows(kind.block))
    weights = np.ones(kind.block, np.float32) if is_weighted else None
    encoded = kind.quantize(rows, weights)
    assert encoded.shape == (2, kind.bytes) and encoded.dtype == np.uint8
    decoded = kind.dequantize(encoded)
    assert np.isfinite(decoded).all()
    off = np.sqrt(((decoded - rows.astype(np.float64)) ** 2).mean(axis=1))
    # a scale is a half: none is smaller than 2 ** -24, and those nearby are rounded to it
    assert (off <= 1.001 * STEPS[name] * span(rows) + 2.0**-24 * 127).all()


@each_type
def test_special_blocks(name: str) -> None:
    kind = by_name(name)
    rows = np.zeros((6, kind.block), np.float32)
    rows[1, 3] = 7.0  # alone
    rows[2] = 0.25  # all alike
    rows[3] = -0.25
    rows[4] = 65504.0 * np.where(np.arange(kind.block) % 2, 1, -1)
    rows[5] = 1e-40
    for weights in (None, np.ones(kind.block, np.float32)):
        decoded = kind.dequantize(kind.quantize(rows, weights))
        assert not decoded[0].any() and not decoded[5].any()
        least = 7 / 113 if name.startswith("iq4") else 1e-6  # they have no level of zero
        np.testing.assert_allclose(decoded[1], rows[1], rtol=0.15, atol=least)
        np.testing.assert_allclose(decoded[2:5], rows[2:5], rtol=0.13)


@each_type
def test_importance_moves_the_error_to_where_it_matters_less(name: str) -> None:
    kind, rows = by_name(name), SAMPLES["gaussian"]
    weights = np.where(np.arange(weight_rows.N) % 4 == 0, 20.0, 1.0).astype(np.float32)
    plain = kind.quantize(rows)
    weighted = kind.quantize(rows, weights)
    errors = [weight_rows.error(rows, kind, encoded, weights) for encoded in (plain, weighted)]
    # Q8_0 knows none, and MXFP4 chooses only between two scales
    most = {"q8_0": 1.0, "mxfp4": 1.0}.get(name, 0.98)
    assert errors[1] <= most * errors[0]


@each_type
def test_weights_that_are_all_zero_do_no_harm(name: str) -> None:
    kind, rows = by_name(name), SAMPLES["gaussian"]
    decoded = kind.quantize(rows, np.zeros(weight_rows.N, np.float32))
    assert weight_rows.error(rows, kind, decoded, None) < 3 * GGML[name]["gaussian"][0]


def test_blocks_that_were_mxfp4_come_back() -> None:
    kind = by_name("mxfp4")
    blocks = np.random.default_rng(3).integers(0, 256, (3000, kind.bytes), np.uint8)
    blocks[:, 0] = np.random.default_rng(4).integers(100, 140, 3000)
    blocks[:900, 1:] &= 0b10110011  # smaller ones only
    decoded = kind.dequantize(blocks)
    assert np.array_equal(kind.dequantize(kind.quantize(decoded)), decoded)


def test_importance_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="Q4_0: 32 weights of importance for 64 columns"):
        by_name("q4_0").quantize(np.zeros((1, 64), np.float32), np.ones(32, np.float32))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 65536, -1e30])
def test_what_a_format_cannot_hold_is_named(value: float) -> None:
    rows = np.ones((3, 64), np.float32)
    check_encodable(by_name("q4_0"), rows)
    rows[2, 5] = value
    with pytest.raises(UnencodableError, match=r"Q4_0 cannot hold .* in row 12, column 5"):
        check_encodable(by_name("q4_0"), rows, first_row=10)
    if np.isfinite(value):
        check_encodable(by_name("bf16"), rows)
    else:
        with pytest.raises(UnencodableError, match="BF16 cannot hold"):
            check_encodable(by_name("bf16"), rows)
    check_encodable(by_name("f32"), rows)
