"""Perplexity and divergence by their definitions, from logits computed in one piece."""

import contextlib
import io
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgellm.errors import EdgeLLMError
from edgellm.evaluation.divergence import divergence
from edgellm.evaluation.perplexity import estimate, perplexity
from edgellm.evaluation.picture import as_letters, by_position, draw
from edgellm.evaluation.text import cut
from edgellm.llm import LLM
from edgellm.quant.gguf import GGUF

TEXT = " ".join(f"{n} men went to mow a meadow, and {n * n} came back." for n in range(40))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


@pytest.fixture(scope="module")
def pair(tiny_model: Callable[..., Path]):  # type: ignore[no-untyped-def]
    paths = tiny_model("llama"), tiny_model("llama", seed=3)
    with LLM(paths[0], n_ctx=128) as a, LLM(paths[1], n_ctx=128) as b:
        yield a, b


def test_chunks(pair: tuple[LLM, LLM]) -> None:
    llm, _ = pair
    tokens = llm.tokenize(TEXT, add_special=True)
    text = cut(llm, TEXT, 100)
    assert text.chunks.shape == (len(tokens) // 100, 100)
    bos = llm.tokenize("", add_special=True)
    for i, chunk in enumerate(text.chunks.tolist()):
        assert chunk == bos[:1] + tokens[100 * i + len(bos[:1]) : 100 * (i + 1)]
    assert cut(llm, TEXT, 100, 2).n_chunks == 2
    with pytest.raises(EdgeLLMError, match="not one chunk of 512: give a longer text"):
        cut(llm, "short", 512)
    with pytest.raises(EdgeLLMError, match="too short"):
        cut(llm, TEXT, 3)


@pytest.mark.parametrize("n_ctx", [7, 100, 128])
def test_perplexity(pair: tuple[LLM, LLM], n_ctx: int) -> None:
    llm, _ = pair
    text = cut(llm, TEXT, n_ctx, 4)
    surprises = []
    for chunk in text.chunks:
        logs = log_softmax(llm.logits(chunk.tolist()))
        surprises += [-logs[i, chunk[i + 1]] for i in range(n_ctx // 2, n_ctx - 1)]
    told: list[int] = []
    found = perplexity(llm, text, lambda done, so_far: told.append(done))
    assert told == list(range(1, text.n_chunks + 1))
    assert found.n_tokens == len(surprises)
    assert math.isclose(found.value, math.exp(np.mean(surprises)), rel_tol=1e-6)
    spread = np.std(surprises, ddof=1) / math.sqrt(len(surprises))
    assert math.isclose(found.error, found.value * spread, rel_tol=1e-5)


def test_divergence(pair: tuple[LLM, LLM], tmp_path: Path) -> None:
    a, b = pair
    text = cut(a, TEXT, 100, 3)
    found = divergence(a, b, text)
    assert found.kl.shape == (3, 49)
    for row, chunk in enumerate(text.chunks):
        p, q = (log_softmax(llm.logits(chunk.tolist()))[50:99] for llm in pair)
        np.testing.assert_allclose(found.kl[row], (np.exp(p) * (p - q)).sum(1), atol=2e-6)
        assert (found.same_top[row] == (p.argmax(1) == q.argmax(1))).all()
        own = np.arange(49), chunk[51:100]
        np.testing.assert_allclose(found.surprises[0][row], -p[own], atol=1e-5)
        np.testing.assert_allclose(found.surprises[1][row], -q[own], atol=1e-5)
    assert math.isclose(found.perplexities[0].value, perplexity(a, text).value, rel_tol=1e-5)
    ratio = found.perplexities[1].value / found.perplexities[0].value
    assert math.isclose(found.perplexity_ratio.value, ratio, rel_tol=1e-6)
    same = divergence(a, a, text)
    assert same.mean_kl == 0 and same.agreement == 1 and same.probability_change == 0

    at, values = by_position(found, 7)
    assert len(at) == 7 and at[0] >= 50 and at[-1] <= 99
    assert math.isclose(by_position(found, 1)[1][0], found.mean_kl)
    assert "█" in as_letters(found) and "█" not in as_letters(same)
    draw(tmp_path / "p.png", found, ("a", "b"))
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"


def test_other_vocabularies(pair: tuple[LLM, LLM], tiny_model: Callable[..., Path]) -> None:
    with LLM(tiny_model("llama", controls=("<a>",)), n_ctx=128) as other:
        with pytest.raises(EdgeLLMError, match="have different vocabularies"):
            divergence(pair[0], other, cut(pair[0], TEXT, 100))


def test_an_estimate() -> None:
    assert estimate(np.array([math.log(4.0)])).value == pytest.approx(4)
    assert str(estimate(np.array([0.0, 0.0]))) == "1.0000 +/- 0.00000"


@pytest.mark.real
def test_llama_cpp_agrees(real_model: Callable[[str], Path]) -> None:
    """A quantized path has its own rounding; the text is long enough for it to average out."""
    llama_cpp = pytest.importorskip("llama_cpp")
    path = str(real_model("smollm2"))
    text = (Path(__file__).parents[3] / "README.md").read_text()
    with LLM(path, n_ctx=256) as llm:
        read = cut(llm, text, 256, 8)
        ours = perplexity(llm, read)
    model = llama_cpp.Llama(path, n_ctx=256, n_batch=256, logits_all=True, verbose=False)
    surprises: list[float] = []
    for chunk in read.chunks:
        model.reset()
        model.eval(chunk.tolist())
        logs = log_softmax(model.scores[128:255])
        surprises += (-logs[np.arange(127), chunk[129:256]]).tolist()
    assert ours.value == pytest.approx(math.exp(np.mean(surprises)), rel=0.01)


def test_a_model_without_tokenizer() -> None:
    path = Path(__file__).parents[2] / "data" / "arch" / "phi3.gguf"
    with LLM(path, n_ctx=64) as llm, pytest.raises(EdgeLLMError, match="no tokenizer, so it"):
        cut(llm, TEXT, 64)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_predictions_that_are_no_numbers(
    tiny_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: float
) -> None:
    from edgellm.cli.main import run

    good, path, file = str(tiny_model("llama")), tmp_path / "m.gguf", tmp_path / "text"
    file.write_text(TEXT)
    data = bytearray(Path(good).read_bytes())
    with GGUF(good) as gguf:
        norm = gguf.tensors["output_norm.weight"]
    data[norm.offset : norm.offset + 4] = np.float32(bad).tobytes()
    path.write_bytes(data)
    flags = ["-f", str(file), "-c", "64"]
    for command in (
        ["perplexity", str(path), "--json"],
        ["compare", good, str(path), "--json"],
        ["imatrix", str(path), "-o", str(tmp_path / "im.gguf")],
        ["quantize", str(path), str(tmp_path / "q.gguf"), "--target-size", "1M",
         "--allow-requantize"],
    ):  # fmt: skip
        assert run([*command, *flags]) == 2
        out, err = capsys.readouterr()
        assert "predicts NaN or infinity" in err and not out
    assert {p.name for p in tmp_path.iterdir()} == {"m.gguf", "text"}


def test_commands(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    from edgellm.cli.main import run

    file = tmp_path / "text"
    file.write_text(TEXT)
    models = [str(tiny_model("llama")), str(tiny_model("llama", seed=3))]

    def output(*arguments: str) -> str:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert run(list(arguments)) == 0
        return out.getvalue()

    said = output("perplexity", models[0], "-f", str(file), "-c", "64", "--json")
    with LLM(models[0], n_ctx=64) as llm:
        assert json.loads(said)["perplexity"] == perplexity(llm, cut(llm, TEXT, 64)).value
    assert output("perplexity", models[0], "-f", str(file), "-c", "64").startswith(
        "Final estimate: "
    )

    picture = str(tmp_path / "p.png")
    shown = output("compare", *models, "-f", str(file), "-c", "64", "--n-prompts", "2", "-n", "9",
                   "--n-tasks", "1", "--picture", picture, "--texts")  # fmt: skip
    for word in ("perplexity", "sums right", "JSON that parses", "KL by position", "answers are"):
        assert word in shown
    assert Path(picture).stat().st_size > 1000
    file.write_text(TEXT[:200])
    facts = json.loads(output("compare", *models, "--prompts", str(file), "--n-tasks", "0",
                              "-n", "4", "--json"))  # fmt: skip
    assert facts["text"] is None and len(facts["prompts"]) == 1
    assert run(["compare", *models, "--picture", picture]) == 2
    file.write_text(TEXT)  # one prompt, longer than what the models were trained for
    assert run(["compare", *models, "--prompts", str(file), "--n-tasks", "0"]) == 2
    assert run(["perplexity", models[0]]) == 2
