"""Every type decodes to the same bits as gguf-py, the format's own reference in Python."""

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edgellm.quant import TYPES, QuantType, UnsupportedType, by_name
from edgellm.quant.block import NumpyBlock

ALL = pytest.mark.parametrize("quant_type", TYPES.values(), ids=str)
QUANTIZED = [t for t in TYPES.values() if t.block > 1]


def assert_same(quant_type: QuantType, data: np.ndarray) -> None:
    with np.errstate(invalid="ignore", over="ignore"):
        want = gguf.dequantize(data, gguf.GGMLQuantizationType(quant_type.id))
    got = quant_type.dequantize(data)
    assert got.dtype == np.float32 and got.shape == want.shape
    # Bits, so that -0 differs from 0; the sign and payload of a NaN are no promise of anyone.
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got.view(np.uint32)[~nan], want.view(np.uint32)[~nan])


@ALL
def test_sizes(quant_type: QuantType) -> None:
    kind = gguf.GGMLQuantizationType(quant_type.id)
    assert kind.name == str(quant_type)
    assert gguf.GGML_QUANT_SIZES[kind] == (quant_type.block, quant_type.bytes)


@ALL
def test_random_blocks(quant_type: QuantType) -> None:
    """Random bytes: finite, subnormal, infinite and NaN scales alike."""
    data = np.random.default_rng(1).integers(0, 256, (3, 700 * quant_type.bytes), np.uint8)
    assert_same(quant_type, data)


@ALL
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_any_block(quant_type: QuantType, data: st.DataObject) -> None:
    blocks = data.draw(hnp.arrays(np.uint8, (2, 2 * quant_type.bytes)))
    assert_same(quant_type, blocks)


@pytest.mark.parametrize("quant_type", [t for t in QUANTIZED if t.name != "mxfp4"], ids=str)
def test_every_scale(quant_type: QuantType) -> None:
    """All 65,536 bit patterns of each half in the block."""
    where = {"q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}
    where |= {"q4_1": (0, 2), "q5_1": (0, 2), "tq1_0": (52,), "tq2_0": (64,), "iq1_m": ()}
    rng = np.random.default_rng(2)
    blocks = np.tile(rng.integers(0, 256, (1, quant_type.bytes), np.uint8), (65536, 1))
    for offset in where.get(quant_type.name, (0,)):
        blocks[:, offset : offset + 2] = (
            rng.permutation(65536).astype("<u2")[:, None].view(np.uint8)
        )
    assert_same(quant_type, blocks)


def test_iq1_m_every_scale() -> None:
    """Its half lies in four nibbles."""
    blocks = np.tile(np.random.default_rng(4).integers(0, 256, (1, 56), np.uint8), (65536, 1))
    for i in range(4):
        nibble = (np.arange(65536) >> (4 * i) & 15).astype(np.uint8)
        blocks[:, 49 + 2 * i] = blocks[:, 49 + 2 * i] & 15 | nibble << 4
    assert_same(by_name("iq1_m"), blocks)


def test_mxfp4_every_exponent() -> None:
    blocks = np.tile(np.arange(17, dtype=np.uint8) * 15, (256, 1))
    blocks[:, 0] = np.arange(256)
    assert_same(by_name("mxfp4"), blocks)


@pytest.mark.parametrize("quant_type", QUANTIZED, ids=str)
def test_codes_and_scales(quant_type: QuantType) -> None:
    """Chunks are what a compiler counts on: unsigned, of one length, one scale for each."""
    block = NumpyBlock(np.random.default_rng(3).integers(0, 256, (5, quant_type.bytes), np.uint8))
    with np.errstate(invalid="ignore"):
        codes, scales = list(quant_type.codes(block)), list(quant_type.scales(block))
    assert len(codes) == len(scales) == quant_type.block // quant_type.chunk
    assert all(c.dtype == np.uint8 and c.shape == (5, quant_type.chunk) for c in codes)
    for pair in scales:
        assert all(s is None or (s.dtype == np.float32 and s.shape == (5, 1)) for s in pair)
    assert quant_type.table is None or len(quant_type.table) == 16


@ALL
def test_refuses_part_of_a_block(quant_type: QuantType) -> None:
    with pytest.raises(ValueError, match="multiple of"):
        quant_type.dequantize(np.zeros(quant_type.bytes + 1, np.uint8))
    if quant_type.block > 1:
        with pytest.raises(ValueError, match="whole number of blocks"):
            quant_type.row_bytes(quant_type.block + 1)
    assert quant_type.row_bytes(quant_type.block * 3) == quant_type.bytes * 3


def test_names() -> None:
    assert by_name("Q4_K") is by_name("q4_k") is TYPES[12]
    with pytest.raises(UnsupportedType, match="nvfp4 is not supported; supported: F32 F16"):
        by_name("nvfp4")


@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"])
def test_encoders_give_the_bits_of_gguf_py(name: str) -> None:
    kind = by_name(name)
    x = np.random.default_rng(3).standard_normal((50, 256)).astype(np.float32)
    x[1], x[2, :32], x[3, :32] = 0, np.arange(32) - 15.5, np.tile([-1, 1], 16)
    want = gguf.quants.quantize(x, gguf.GGMLQuantizationType(kind.id)).view(np.uint8)
    found = kind.quantize(x)
    assert np.array_equal(found, want.reshape(found.shape))
    again = kind.dequantize(found)
    assert np.array_equal(kind.dequantize(kind.quantize(again)), again) or name == "q4_0"


def test_a_format_without_an_encoder_says_so() -> None:
    with pytest.raises(TypeError, match="IQ2_S has no encoder"):
        by_name("iq2_s").quantize(np.zeros((1, 256), np.float32))
