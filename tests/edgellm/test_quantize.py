"""Quantized files hold what the specification makes of every row, and everything else as it was."""

import contextlib
import io
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import killed
import numpy as np
import pytest

from edgellm.cli.main import run
from edgellm.llm import LLM
from edgellm.quant import by_name, imatrix, recipes
from edgellm.quant.gguf import GGUF, GGUFError
from edgellm.quant.values import encode
from edgellm.quant.writer import NewTensor, Writer
from edgellm.quantize import plan, quantize, size_of

F16 = (gguf.GGMLQuantizationType.F16,)


@pytest.fixture
def model(tiny_model: Callable[..., Path]) -> str:
    """Rows of 256 and 192 elements, all F16."""
    return str(tiny_model("llama", n_embd=256, n_ff=192, types=F16))


def read(path: str | Path) -> dict[str, np.ndarray]:
    """Tensors dequantized by the gguf package."""
    return {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}


def fields(path: str | Path) -> dict[str, Any]:
    reader = gguf.GGUFReader(path)
    return {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}


@pytest.mark.parametrize("mix", recipes.MIXES)
def test_every_mix(model: str, tmp_path: Path, mix: str) -> None:
    out = str(tmp_path / "out.gguf")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert run(["quantize", model, out, mix.lower(), "2"]) == 0
    assert said.getvalue().strip() == out
    want = fields(model) | {
        "general.file_type": recipes.MIXES[mix].file_type, "general.quantization_version": 2
    }  # fmt: skip
    assert fields(out) == want
    source, found = read(model), read(out)
    kinds = {t.name: t.tensor_type.name.lower() for t in gguf.GGUFReader(out).tensors}
    with GGUF(model) as file:
        choices = plan(file, mix)
        assert [c.tensor.name for c in choices] == list(found)
        assert size_of(choices) == sum(t.n_bytes for t in GGUF(out).tensors.values())
    for choice in choices:
        name = choice.tensor.name
        assert kinds[name] == choice.type.name
        if choice.is_copied:
            np.testing.assert_array_equal(found[name], source[name])
        else:
            made = choice.type.dequantize(choice.type.quantize(source[name]))
            np.testing.assert_array_equal(found[name], made)
    with LLM(out, n_ctx=64) as llm:
        assert np.isfinite(llm.logits([1, 2, 3])).all()


def test_names_and_sizes(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "m.gguf"
    source.write_bytes(Path(model).read_bytes())
    assert run(["quantize", str(source), "Q4_K"]) == 0
    out = capsys.readouterr().out.strip()
    assert out == str(tmp_path / "ggml-model-Q4_K_M.gguf")
    assert run(["quantize", str(source), "Q4_K_M", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "blk.0.ffn_down.weight" in shown and "Q5_0" in shown and "bits per weight" in shown
    assert run(["quantize", "--list"]) == 0
    assert "MXFP4_MOE" in capsys.readouterr().out
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(("words", "said"), [
    (["MODEL", "OUT", "Q9_K"], "'Q9_K' is no type; there are F32"),
    (["MODEL"], "a TYPE"),
    (["MODEL", "OUT", "Q8_0", "0"], "at least 1"),
    (["MODEL", "OUT", "Q8_0", "--tensor-type", "attn"], "takes PATTERN=TYPE"),
    (["MODEL", "OUT", "Q8_0", "--tensor-type", "(=q8_0"], "no regular expression"),
    (["MODEL", "OUT", "Q8_0", "--tensor-type", "nothing=q8_0"], "no matrix has such a name"),
    (["MODEL", "OUT", "Q8_0", "--output-tensor-type", "iq1_s"], "is no type"),
    (["MODEL", "OUT", "Q8_0", "--imatrix", "missing"], "missing: file cannot be read"),
    (["MODEL", "OUT", "Q8_0", "--imatrix", "MODEL"], "is no importance matrix"),
    (["missing.gguf", "OUT", "Q8_0"], "missing.gguf"),
    (["MODEL", "no/folder.gguf", "Q8_0"], "there is no folder no"),
    (["MODEL", "Q4_K_M", "--target-size", "1M"], "no TYPE goes with it"),
])  # fmt: skip
def test_refusals(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], words: list[str], said: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert run(["quantize", *(model if word == "MODEL" else word for word in words)]) == 2
    out, err = capsys.readouterr()
    assert said in err and err.count("\n") == 1 and not out
    assert not any(tmp_path.iterdir())


def test_twice_only_if_wanted(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    once, twice = str(tmp_path / "once.gguf"), str(tmp_path / "twice.gguf")
    assert run(["quantize", model, once, "Q8_0"]) == 0
    assert run(["quantize", once, twice, "Q4_0"]) == 2
    assert "is quantized already (Q8_0)" in capsys.readouterr().err
    assert run(["quantize", once, twice, "Q4_0", "--allow-requantize"]) == 0
    assert run(["quantize", once, once, "Q4_0", "--allow-requantize", "--force"]) == 2
    assert "is what is read" in capsys.readouterr().err
    assert run(["quantize", model, twice, "Q4_0"]) == 2
    assert "exists; use --force" in capsys.readouterr().err
    assert run(["quantize", model, twice, "Q8_0", "--force"]) == 0
    assert Path(once).read_bytes() == Path(twice).read_bytes()


def test_in_parts(model: str, tmp_path: Path) -> None:
    assert run(["split", model, str(tmp_path / "m"), "--max-tensors", "8"]) == 0
    first = str(next(tmp_path.glob("m-00001-of-*")))
    assert run(["quantize", first, str(tmp_path / "q.gguf"), "Q8_0", "--keep-split"]) == 0
    parts = sorted(tmp_path.glob("q-*"))
    assert len(parts) == len(list(tmp_path.glob("m-*"))) > 1
    assert run(["quantize", first, str(tmp_path / "whole.gguf"), "Q8_0"]) == 0
    whole, found = read(tmp_path / "whole.gguf"), {}
    for part in parts:
        found |= read(part)
    assert whole.keys() == found.keys()
    for name, values in whole.items():
        np.testing.assert_array_equal(values, found[name])
    with LLM(parts[0], n_ctx=64) as a, LLM(tmp_path / "whole.gguf", n_ctx=64) as b:
        np.testing.assert_array_equal(a.logits([1, 2, 3]), b.logits([1, 2, 3]))


def test_importance(model: str, tmp_path: Path) -> None:
    """Columns that matter are kept better than without, by the weights they were given."""
    rng = np.random.default_rng(0)
    weights, matrix = {}, imatrix.ImportanceMatrix(datasets=["d.txt"], n_chunks=4)
    for name, values in read(model).items():
        if values.ndim == 2 and name != "token_embd.weight":
            weights[name] = np.exp(2 * rng.standard_normal(values.shape[1])).astype(np.float32)
            matrix.sums[name] = 5 * weights[name][None]
            matrix.counts[name] = np.full(1, 5, np.float32)
    file = str(tmp_path / "im.gguf")
    matrix.write(file)
    plain, weighted = str(tmp_path / "plain.gguf"), str(tmp_path / "weighted.gguf")
    assert run(["quantize", model, plain, "Q4_K_S"]) == 0
    assert run(["quantize", model, weighted, "Q4_K_S", "--imatrix", file]) == 0
    source, without, with_it = read(model), read(plain), read(weighted)
    for name, weight in weights.items():
        errors = [
            ((found[name] - source[name]) ** 2 * weight).sum() for found in (without, with_it)
        ]
        assert errors[1] < errors[0], name
    np.testing.assert_array_equal(without["token_embd.weight"], with_it["token_embd.weight"])
    said = fields(weighted)
    assert said["quantize.imatrix.file"] == "im.gguf"
    assert said["quantize.imatrix.dataset"] == "d.txt"
    assert said["quantize.imatrix.entries_count"] == len(weights)
    assert said["quantize.imatrix.chunks_count"] == 4


def test_importance_of_other_matrices(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    matrix, file, out = imatrix.ImportanceMatrix(), str(tmp_path / "im.gguf"), str(tmp_path / "q")
    for name, n, said in (
        ("blk.9.attn_q.weight", 2, "names no matrix of"),
        ("blk.0.attn_q.weight", 0, "has nothing on 13, such as blk.0.attn_k.weight."),
    ):
        columns = read(model)["blk.0.attn_q.weight"].shape[1]
        matrix.sums[name] = np.ones((1, columns), np.float32)
        matrix.counts[name] = np.ones(1, np.float32)
        matrix.write(file, force=True)
        assert run(["quantize", model, out, "Q8_0", "--imatrix", file]) == n
        assert said in capsys.readouterr().err
        assert Path(out).exists() == (n == 0)


def test_experts_have_their_own_importance(tmp_path: Path) -> None:
    rng, path = np.random.default_rng(0), str(tmp_path / "m.gguf")
    data = rng.standard_normal((3, 7, 64)).astype(np.float32)
    keys = {"block_count": 1, "attention.head_count": 1, "expert_count": 3}
    metadata = {"general.architecture": encode("llama")}
    metadata |= {f"llama.{key}": encode(value) for key, value in keys.items()}
    name = "blk.0.ffn_up_exps.weight"
    with Writer(path, metadata, [NewTensor(name, (64, 7, 3), by_name("f32"))]) as out:
        out.write(data)
    weights = np.exp(2 * rng.standard_normal((3, 64))).astype(np.float32)
    matrix = imatrix.ImportanceMatrix(
        {name: weights * np.array([[4], [2], [1]], "f4")}, {name: np.array([4, 2, 1], "f4")}
    )
    with GGUF(path) as file:
        choices = plan(file, "Q4_0", imatrix=matrix)
        quantize(file, str(tmp_path / "q.gguf"), choices, 2)
    found = read(tmp_path / "q.gguf")[name]
    q4_0 = by_name("q4_0")
    for i in range(3):
        made = q4_0.dequantize(q4_0.quantize(data[i], weights[i]))
        np.testing.assert_array_equal(found[i], made)
    with GGUF(path) as file, pytest.raises(ValueError, match="measured on another model"):
        matrix.sums[name] = matrix.sums[name][:, :32]
        plan(file, "Q4_0", imatrix=matrix)


def test_a_damaged_model_is_refused(model: str, tmp_path: Path) -> None:
    damaged = tmp_path / "m.gguf"
    damaged.write_bytes(Path(model).read_bytes())
    with GGUF(model) as file:
        at = file.tensors["blk.1.attn_q.weight"].offset
    with open(damaged, "r+b") as file_:
        file_.seek(at + 2 * 300)
        file_.write(np.array([np.nan], np.float16).tobytes())
    with GGUF(damaged) as file, pytest.raises(GGUFError, match="attn_q.*cannot hold nan in row 1"):
        quantize(file, str(tmp_path / "q.gguf"), plan(file, "Q4_K_M"), 15)
    assert not list(tmp_path.glob("q.gguf*"))


def test_rows_that_no_block_divides(
    tiny_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_model("llama", n_embd=120, n_heads=3, n_kv_heads=3, n_ff=200, types=F16)
    assert run(["quantize", str(path), str(tmp_path / "q.gguf"), "Q4_K_M"]) == 0
    said = capsys.readouterr().err
    assert "rows of no whole number of blocks (120 elements, blocks of 256) and get F16" in said


def test_patterns_and_the_rest(model: str, tmp_path: Path) -> None:
    out = str(tmp_path / "q.gguf")
    wishes = ["--pure", "--tensor-type", r"blk\.1\.attn_[qk]=q6_k"]
    wishes += ["--output-tensor-type", "F16", "--token-embedding-type", "q5_1"]
    assert run(["quantize", model, out, "Q4_0", *wishes]) == 0
    with GGUF(out) as file:
        kinds = {name: tensor.type.name for name, tensor in file.tensors.items()}
    for name, kind in kinds.items():
        want = "f32" if name.endswith("norm.weight") else "q4_0"
        if re.search(r"blk\.1\.attn_[qk]\.", name):
            want = "q6_k"
        want = {"output.weight": "f16", "token_embd.weight": "q5_1"}.get(name, want)
        assert kind == want, name


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kills", [6, pytest.param(100, marks=pytest.mark.slow)])
def test_kills(tiny_model: Callable[..., Path], tmp_path: Path, kills: int) -> None:
    model = tiny_model("llama", n_layers=8, n_embd=512, n_ff=1536, types=F16)
    killed.check(["quantize", str(model), str(tmp_path / "q.gguf"), "Q5_0"], tmp_path, kills)


MEMORY = """
import sys
from edgellm.cli.main import run
from edgellm.memory import peak_resident_bytes
assert run(["quantize", *sys.argv[1:], "2"]) == 0
print(peak_resident_bytes(), file=sys.stderr)
"""


@pytest.mark.slow
def test_memory(tmp_path: Path) -> None:
    """A model of 1.2 GB, whose largest tensor has 256 MB: less than twice that and 200 MB."""
    path, largest = str(tmp_path / "m.gguf"), 2 * 4096 * 32768
    f16, row = by_name("f16"), 4096
    keys = {"block_count": 4, "attention.head_count": 32}
    metadata = {"general.architecture": encode("llama")}
    metadata |= {f"llama.{key}": encode(value) for key, value in keys.items()}
    names = ["token_embd.weight", *(f"blk.{i}.ffn_down.weight" for i in range(4))]
    rng = np.random.default_rng(0)
    with Writer(path, metadata, [NewTensor(name, (row, 32768), f16) for name in names]) as out:
        for _ in names:
            for _ in range(32):
                out.write(rng.standard_normal((1024, row), np.float32).astype(np.float16))
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, path, str(tmp_path / "q.gguf"), "Q8_0"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert int(done.stderr.split()[-1]) < 2 * largest + (200 << 20)
