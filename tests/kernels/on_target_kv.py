"""Tests of the cache's number formats for the target of this process; test_targets runs them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import architectures
import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from samples import nmse

from edgellm.kernels.cpu import attention
from edgellm.kernels.cpu.attention import AttentionShape
from edgellm.kernels.cpu.kv_types import BLOCK, KV_TYPES, KVType, kv_type
from edgellm.kernels.cpu.store import KernelStore
from edgellm.quant import by_name

STORE = KernelStore()
KERNEL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
HEADS, DIM, V_DIM = 2, 96, 64
PAIRS = [("q8_0", "q8_0"), ("q4_0", "q4_0"), ("q8_0", "q4_0"), ("f16", "q8_0"), ("q4_0", "f32")]


def rows(n: int, dim: int, seed: int) -> NDArray[np.float32]:
    """Random ones, then what rounding and scales have to get right."""
    x = np.random.default_rng(seed).standard_normal((n, dim)).astype(np.float32)
    x[1] = 0
    x[2, :32] = np.arange(32) - 15.5  # halves
    x[3] *= 1e-8  # scales that are subnormal halves
    x[4] *= 1e4
    x[5, :32] = np.tile([1, -1], 16)  # the largest is there with both signs
    x[6, :32] = np.tile([-1, 1], 16)
    x[7] = np.round(x[7] * 4) / 2
    return x


def stored(kind: KVType, k: NDArray[np.float32], v: NDArray[np.float32]):  # type: ignore[no-untyped-def]
    """Rows of the number format as two pools hold them after a kernel wrote k and v there."""
    n = len(k)
    shape = AttentionShape(HEADS, HEADS, DIM, V_DIM, 1.0, None, kind, kind)
    n_blocks = -(-n // BLOCK) + 3
    keys = np.zeros((n_blocks, shape.key_block_bytes()), np.uint8)
    values = np.zeros((n_blocks, shape.value_block_bytes()), np.uint8)
    blocks = np.random.default_rng(0).permutation(n_blocks)
    slots = blocks[np.arange(n) // BLOCK] * BLOCK + np.arange(n) % BLOCK
    arrays = (k, k.strides[0], v, v.strides[0], slots, keys, values)
    args = np.array([a if isinstance(a, int) else a.ctypes.data for a in arrays], np.int64)
    address = STORE.get(f"kv_store_{shape.name}", attention.make_kv_store(shape))
    KERNEL(address)(args.ctypes.data, 0, n, 0)
    return (
        kind.rows(keys[blocks], HEADS, DIM, True)[:n],
        kind.rows(values[blocks], HEADS, V_DIM, False)[:n],
    )


@pytest.mark.parametrize("name", KV_TYPES)
def test_the_cache_holds_the_bits_of_the_number_format(name: str) -> None:
    """As ``quant`` encodes a row and as gguf-py does; blocks take no more than the format."""
    k, v = rows(1000, HEADS * DIM, 1), rows(1000, HEADS * V_DIM, 2)
    for x, found in zip((k, v), stored(kv_type(name), k, v), strict=True):
        assert np.array_equal(found, by_name(name).quantize(x))
        reference = gguf.quants.quantize(x, gguf.GGMLQuantizationType(by_name(name).id))
        assert np.array_equal(found, reference.view(np.uint8).reshape(found.shape))


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_numbers_that_are_not_finite_stay_so(name: str) -> None:
    """A damaged file is seen in the logits: its NaN must not become a code."""
    k, v = rows(8, HEADS * DIM, 1), rows(8, HEADS * V_DIM, 2)
    for x in (k, v):
        x[0, 5], x[1, 40], x[2, 3] = np.nan, np.inf, 1e30
    for found, first in zip(stored(kv_type(name), k, v), (k, v), strict=True):
        values = by_name(name).dequantize(found).reshape(len(first), -1, 32)
        assert not np.isfinite(values[0, 0]).any() and np.isfinite(values[0, 1:]).all()
        assert not np.isfinite(values[1, 1]).any() and not np.isfinite(values[2, 0, 3])
        assert np.isfinite(values[3:]).all()


OTHERS = ("bert", "deepseek2", "gpt-oss", "gpt2", "qwen35")


@pytest.mark.parametrize(
    ("name", "types"),
    [("gemma2", pair) for pair in PAIRS] + [(name, ("q8_0", "q4_0")) for name in OTHERS],
)
def test_attention_agrees_with_the_reference_over_what_the_cache_holds(
    tmp_path: Path, name: str, types: tuple[str, str], monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Not causal, latent, capped, with learned scores, plain and hybrid; windows; all sizes of
    tiles, one token, several pieces."""
    from edgellm import LLM, SamplingParams

    lengths = {"attention__key_length": 64, "attention__value_length": 32}
    if name in ("bert", "gpt2"):  # heads are parts of the embedding
        lengths = {"attention__head_count": 2, "attention__head_count_kv": 2,
                   "attention__key_length": 32, "attention__value_length": 32}  # fmt: skip
    if name == "qwen35":
        lengths["attention__value_length"] = 64
    if name == "deepseek2":  # 64 + 32 of the latent vector and the rotated part
        lengths = {"rope__dimension_count": 32, "attention__key_length": 96,
                   "attention__key_length_mla": 64}  # fmt: skip
    monkeypatch.setenv("EDGELLM_TRACE", "ops")
    path = architectures.write(tmp_path / "model.gguf", name, **lengths)
    with LLM(path, n_ctx=512, n_threads=2, type_k=types[0], type_v=types[1]) as llm:
        if name == "bert":
            llm.embed([list(range(90)), [5], list(range(96)) * 3])
        else:
            greedy = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
            llm.generate([list(range(1, 90)), [5], list(range(40, 50))], greedy)
            llm.logits(list(range(96)) * 3)
    assert "agree with the reference" in capfd.readouterr().err


@pytest.mark.parametrize("types", PAIRS, ids="-".join)
def test_logits_are_those_of_the_specification(
    tiny_model: Callable[..., Path], types: tuple[str, str]
) -> None:
    """The reference quantizes keys and values itself: nothing here comes from the cache."""
    from on_target import logits_and_reference

    found, expected = logits_and_reference(
        tiny_model("gemma3"), np.random.default_rng(3).integers(0, 258, 150), types
    )
    assert nmse(found, expected) < 3e-3
