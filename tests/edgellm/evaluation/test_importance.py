"""Importance matrices: sums equal those of the reference's inputs, files are llama.cpp's format."""

import contextlib
import io
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from loaded import loader

from edgellm.evaluation.importance import measure
from edgellm.evaluation.text import cut
from edgellm.kernels import reference
from edgellm.llm import LLM
from edgellm.models import build_graph
from edgellm.quant import imatrix
from edgellm.quant.gguf import GGUF, GGUFError

DATA = Path(__file__).parents[2] / "data" / "arch"
TEXT = " ".join(f"{n} men went to mow a meadow." for n in range(40))


def expected(path: Path, chunks: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Sums and counts, from the specification's own inputs of every matrix."""
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    with GGUF(path) as file:
        _, graph = build_graph(file)
        load = loader(file)
        for chunk in chunks:
            step = reference.Step(chunk, np.arange(len(chunk)), load)
            values: dict[object, np.ndarray] = {}
            for op in graph.ops:
                inputs = [values[x] for x in op.inputs]
                values[op.output] = reference.evaluate(op, inputs, step)
                if op.kind not in ("linear", "head_linear", "moe_linear"):
                    continue
                if op.output is graph.output:
                    continue
                weight = op.weights["weight"]
                n = weight.shape[2] if len(weight.shape) > 2 else 1
                sums, counts = found.setdefault(
                    weight.name, (np.zeros((n, weight.n_in)), np.zeros(n))
                )
                x = inputs[0].astype(np.float64).reshape(len(chunk), -1, weight.n_in)
                for row in range(len(chunk)):
                    if op.kind != "moe_linear":
                        sums += x[row] ** 2
                        counts += 1
                        continue
                    ids = inputs[1][row, : inputs[1].shape[1] // 2].astype(int)
                    for rank, expert in enumerate(ids):
                        sums[expert] += x[row, min(rank, x.shape[1] - 1)] ** 2
                        counts[expert] += 1
    return found


@pytest.mark.parametrize("name", ["phi3", "olmoe", "gpt-oss", "deepseek2", "lfm2"])
def test_sums(name: str, tmp_path: Path) -> None:
    path = DATA / f"{name}.gguf"
    chunks = np.random.default_rng(0).integers(0, 96, (2, 40))
    want = expected(path, chunks)
    with LLM(path, n_ctx=40, type_k="f32", type_v="f32") as llm:
        from edgellm.evaluation.text import Text

        found = measure(llm, Text(chunks), "numbers")
        assert not llm.runner.program.hooks
    assert found.sums.keys() == want.keys()
    for tensor, (sums, counts) in want.items():
        if counts.sum() == found.counts[tensor].sum() and len(counts) > 1:
            # a route may tip where two experts are nearly equal
            assert np.abs(counts - found.counts[tensor]).sum() <= 0.04 * counts.sum() + 2, tensor
            same = counts == found.counts[tensor]
            sums, found.sums[tensor] = sums[same], found.sums[tensor][same]
        else:
            np.testing.assert_array_equal(counts, found.counts[tensor])
        # activations are rounded to 8 bits on the way
        error = ((sums - found.sums[tensor]) ** 2).sum() / (sums**2).sum()
        assert error < 1e-2, (tensor, error)


def test_round_trip(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    made = imatrix.ImportanceMatrix(
        sums={"a.weight": rng.random((1, 8), "f4"), "e.weight": rng.random((3, 4), "f4")},
        counts={"a.weight": np.full(1, 7, "f4"), "e.weight": np.array([2, 0, 5], "f4")},
        datasets=["one.txt"], n_chunks=3, chunk_size=512,
    )  # fmt: skip
    path = str(tmp_path / "i.gguf")
    made.write(path)
    reader = gguf.GGUFReader(path)
    assert reader.fields["general.type"].contents() == "imatrix"
    assert reader.fields["imatrix.datasets"].contents() == ["one.txt"]
    tensors = {t.name: t.data for t in reader.tensors}
    np.testing.assert_array_equal(tensors["e.weight.in_sum2"], made.sums["e.weight"])
    np.testing.assert_array_equal(tensors["e.weight.counts"].ravel(), made.counts["e.weight"])

    read = imatrix.read(path)
    assert (read.datasets, read.n_chunks, read.chunk_size) == (["one.txt"], 3, 512)
    np.testing.assert_array_equal(read.sums["a.weight"], made.sums["a.weight"])
    weights = read.importance("e.weight", 4, 3)
    assert weights is not None
    np.testing.assert_allclose(weights[0], made.sums["e.weight"][0] / 2)
    np.testing.assert_array_equal(weights[1], 1)  # no token reached that expert
    assert read.importance("other.weight", 4, 1) is None
    with pytest.raises(ValueError, match="another model"):
        read.importance("a.weight", 9, 1)


def test_the_binary_format(tmp_path: Path) -> None:
    """As llama.cpp wrote it until 2025; experts lie behind one another."""
    values = np.arange(6, dtype=np.float32)
    path = tmp_path / "i.dat"
    entry = struct.pack("<i8s2i", 8, b"e.weight", 4, 6) + values.tobytes()
    path.write_bytes(struct.pack("<i", 1) + entry + struct.pack("<2i5s", 4, 5, b"a.txt"))
    read = imatrix.read(str(path))
    assert read.n_chunks == 4 and read.datasets == ["a.txt"]
    weights = read.importance("e.weight", 3, 2)
    assert weights is not None
    np.testing.assert_array_equal(weights, values.reshape(2, 3) / 4)
    for n in range(len(path.read_bytes()) - 14):
        path.write_bytes((struct.pack("<i", 1) + entry)[:n])
        with pytest.raises(GGUFError):
            imatrix.read(str(path))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_senseless_values(tmp_path: Path, bad: float) -> None:
    path = str(tmp_path / "i.gguf")
    sums = {"a": np.array([[1, bad]], np.float32)}
    imatrix.ImportanceMatrix(sums, {"a": np.ones(1, np.float32)}).write(path)
    with pytest.raises(GGUFError, match="no sums of squares"):
        imatrix.read(path)


@pytest.mark.parametrize("bad", [-1.0, 1e-40, np.nan])
def test_senseless_counts(tmp_path: Path, bad: float) -> None:
    path, counts = str(tmp_path / "im.gguf"), np.array([bad], np.float32)
    imatrix.ImportanceMatrix({"a": np.ones((1, 4), np.float32)}, {"a": counts}).write(path)
    with pytest.raises(GGUFError, match="tensor a has values that are no"):
        imatrix.read(path)


def test_a_model_is_no_matrix(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(GGUFError, match="is no importance matrix"):
        imatrix.read(str(tiny_model()))


def test_command(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    from edgellm.cli.main import run

    text, out = tmp_path / "t.txt", str(tmp_path / "i.gguf")
    text.write_text(TEXT)
    command = ["imatrix", str(tiny_model()), "-f", str(text), "-c", "64", "-o", out]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert run(command) == 0
    assert said.getvalue().strip() == out
    assert run(command) == 2  # it exists
    found = imatrix.read(out)
    with LLM(tiny_model(), n_ctx=64) as llm:
        again = measure(llm, cut(llm, TEXT, 64))
        assert "output.weight" not in again.sums
        with_output = measure(llm, cut(llm, TEXT, 64), with_output=True)
    assert found.datasets == ["t.txt"]
    for name, sums in again.sums.items():
        np.testing.assert_array_equal(sums, found.sums[name])
        np.testing.assert_array_equal(sums, with_output.sums[name])
    assert "output.weight" in with_output.sums
