"""Types for a size or a loss: near the best by trying all, and the promises hold in the file."""

import contextlib
import io
import itertools
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.cli.main import run
from edgellm.errors import EdgeLLMError
from edgellm.evaluation.allocation import Option, for_loss, for_size, hull
from edgellm.evaluation.divergence import divergence
from edgellm.evaluation.fit import Fitter
from edgellm.evaluation.text import cut
from edgellm.llm import LLM
from edgellm.quant import by_name
from edgellm.quant.gguf import GGUF

TEXT = " ".join(f"{n} men went to mow a meadow, and {n * n} came back." for n in range(40))
losses = st.floats(0, 10, allow_subnormal=False)
tensors = st.lists(
    st.lists(st.tuples(st.integers(1, 50), losses), min_size=1, max_size=4), min_size=1, max_size=4
)


def named(some: list[list[tuple[int, float]]]) -> dict[str, list[Option]]:
    return {
        f"t{i}": [Option(f"{i}.{j}", *option) for j, option in enumerate(options)]
        for i, options in enumerate(some)
    }


@given(st.lists(st.tuples(st.integers(1, 50), losses), min_size=1, max_size=6))
def test_hull(options: list[tuple[int, float]]) -> None:
    found = hull([Option("", *option) for option in options])
    rates = [(a.loss - b.loss) / (b.n_bytes - a.n_bytes) for a, b in itertools.pairwise(found)]
    assert all(rate > 0 for rate in rates)
    assert all(a >= b * (1 - 1e-9) for a, b in itertools.pairwise(rates))
    assert found[0].n_bytes == min(n for n, _ in options)
    assert found[-1].loss == min(loss for _, loss in options)


@settings(max_examples=200)
@given(tensors, st.integers(0, 200))
def test_for_size(some: list[list[tuple[int, float]]], n_bytes: int) -> None:
    options = named(some)
    found = for_size(options, n_bytes)
    fits = [
        sum(o.loss for o in all_)
        for all_ in itertools.product(*options.values())
        if sum(o.n_bytes for o in all_) <= n_bytes
    ]
    if found is None:
        assert not fits
        return
    assert sum(o.n_bytes for o in found.values()) <= n_bytes
    # At worst the one step for which there was no room is lost.
    largest = max(max(loss for _, loss in one) - min(loss for _, loss in one) for one in some)
    assert min(fits) <= sum(o.loss for o in found.values()) <= min(fits) + largest + 1e-9


@given(tensors, losses)
def test_for_loss(some: list[list[tuple[int, float]]], most: float) -> None:
    found = for_loss(named(some), most)
    least = sum(min(loss for _, loss in one) for one in some)
    assert sum(o.loss for o in found.values()) <= max(most, least) + 1e-6


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama", n_embd=256, n_ff=192, types=(gguf.GGMLQuantizationType.F16,))


def test_replaced_tensors(model: Path) -> None:
    """A model with another matrix says what a file with that matrix says, and is whole again."""
    tokens = [1, 5, 9, 2]
    with LLM(model, n_ctx=64) as llm:
        before = llm.logits(tokens)
        for name in ("blk.1.ffn_up.weight", "token_embd.weight", "output.weight"):
            info = llm.gguf.tensors[name]
            data = np.empty(info.n_bytes, np.uint8)
            llm.gguf.read_into(info, 0, data)
            llm.replace(name, (data.view(np.float16) * np.float16(2)).view(np.uint8))
            changed = llm.logits(tokens)
            assert not np.array_equal(changed, before)
            if name == "output.weight":
                np.testing.assert_allclose(changed, 2 * before, rtol=1e-2, atol=1e-2)
            llm.replace(name, None)
            np.testing.assert_array_equal(llm.logits(tokens), before)
        with pytest.raises(EdgeLLMError, match="is no matrix"):
            llm.replace("output_norm.weight", None)


def test_promises(model: Path, tmp_path: Path) -> None:
    with LLM(model, n_ctx=64) as llm:
        text = cut(llm, TEXT, 64, 3)
        fitter = Fitter(llm, text)
        sizes = [1_300_000, 700_000, 500_000]
        fits = [fitter.of_size(n) for n in sizes]
        before = llm.logits([1, 2, 3])
        assert [f.measured for f in fits] == sorted(f.measured for f in fits)
        fits.append(fitter.of_loss(0.8 * fits[2].measured))
        assert fits[3].measured <= 0.8 * fits[2].measured
        assert fits[3].n_bytes < fits[0].n_bytes
        with pytest.raises(EdgeLLMError, match="--target-size: the smallest file"):
            fitter.of_size(100_000)
        with pytest.raises(EdgeLLMError, match="--max-kld: with the best formats"):
            fitter.of_loss(1e-12)
        np.testing.assert_array_equal(llm.logits([1, 2, 3]), before)
    (tmp_path / "t.txt").write_text(TEXT)
    for i, wanted in (
        (1, ["--target-size", str(sizes[1])]),
        (3, ["--max-kld", repr(0.8 * fits[2].measured)]),
    ):
        found, out = fits[i], str(tmp_path / f"{i}.gguf")
        with contextlib.redirect_stdout(io.StringIO()):
            assert run(["quantize", str(model), out, *wanted, "-f", str(tmp_path / "t.txt"),
                        "-c", "64", "--chunks", "3"]) == 0  # fmt: skip
        assert Path(out).stat().st_size == found.n_bytes
        assert found.n_bytes <= sizes[i] if i < 3 else True
        with GGUF(out) as file:
            assert {n: file.tensors[n].type for n in found.types} == found.types
        with LLM(model, n_ctx=64) as a, LLM(out, n_ctx=64) as b:
            # Kernels of quantized types round activations, which the damaged F16 model does not.
            true = divergence(a, b, text).mean_kl
        assert true == pytest.approx(found.measured, rel=0.25, abs=2e-4)


def test_the_sensitive_one_gets_more(model: Path) -> None:
    """The output matrix of a random model matters more than one layer's value matrix."""
    with LLM(model, n_ctx=64) as llm:
        fitter = Fitter(llm, cut(llm, TEXT, 64, 2))
    at_q4 = {
        name: next(o.loss for o in some if o.type in ("q4_k", "q5_0"))
        for name, some in fitter.options.items()
    }
    assert at_q4["output.weight"] > 2 * np.median(list(at_q4.values()))
    found = for_size(fitter.options, 650_000)
    assert found is not None
    bits = {n: by_name(o.type).bytes / by_name(o.type).block for n, o in found.items()}
    assert bits["output.weight"] >= np.median(list(bits.values()))


@pytest.mark.parametrize(("arguments", "said"), [
    (["--target-size", "1M"], "a text is needed"),
    (["--target-size", "1M", "--max-kld", "0.1", "-f", "TEXT"], "give it or --target-size"),
    (["--max-kld", "0", "-f", "TEXT"], "must be above 0"),
    (["--target-size", "1M", "-f", "TEXT", "--pure"], "leave out flags for types"),
    (["--target-size", "much", "-f", "TEXT"], "takes a size such as"),
    (["Q4_0", "--target-size", "1M", "-f", "TEXT", "OUT"], "no TYPE goes with it"),
])  # fmt: skip
def test_refusals(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    text, out = tmp_path / "t.txt", str(tmp_path / "out.gguf")
    text.write_text(TEXT)
    words = [str(text) if word == "TEXT" else word for word in arguments]
    assert run(["quantize", str(model), out, *words]) == 2
    assert said in capsys.readouterr().err
    assert not Path(out).exists()
