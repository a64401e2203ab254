"""split, merge, hash, set-meta on the command line."""

from collections.abc import Callable
from pathlib import Path

import killed
import pytest

from edgellm.cli.main import run
from edgellm.quant.gguf import GGUF


@pytest.fixture
def model(tiny_model: Callable[..., Path]) -> str:
    return str(tiny_model("llama"))


def test_there_and_back(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = str(tmp_path / "m")
    assert run(["split", model, prefix, "--split-max-size", "100K"]) == 0
    first = capsys.readouterr().out.strip()
    assert first.endswith(".gguf") and "-00001-of-" in first
    assert run(["hash", model]) == 0
    manifest = tmp_path / "manifest"
    manifest.write_text(capsys.readouterr().out)
    whole = str(tmp_path / "whole.gguf")
    assert run(["merge", first, whole]) == 0
    assert run(["hash", "--check", str(manifest), whole]) == 0
    assert run(["set-meta", whole, "general.name=str:New", "--in-place"]) == 0
    with GGUF(whole) as found:
        assert found.string("general.name") == "New"
    assert run(["hash", "-c", str(manifest), whole]) == 0
    Path(tmp_path / "other").write_text(manifest.read_text().replace("0", "1"))
    assert run(["hash", "-c", str(tmp_path / "other"), whole]) == 1


def test_text_from_a_file(model: str, tmp_path: Path) -> None:
    template, out = tmp_path / "chat.jinja", str(tmp_path / "out.gguf")
    template.write_text("{{ messages[0].content }}\n")
    pair = f"tokenizer.chat_template={template}"
    assert run(["set-meta", model, "--file", pair, "-o", out]) == 0
    with GGUF(out) as found:
        assert found.string("tokenizer.chat_template") == template.read_text()


@pytest.mark.parametrize(("arguments", "said"), [
    (["split", "MODEL", "OUT", "--split-max-size", "many"], "--split-max-size takes a size"),
    (["split", "MODEL", "OUT", "--max-size", "2G", "--max-tensors", "3"], "--split-max-tensors"),
    (["split", "MODEL", "OUT", "--split-max-size", "9" * 400 + "G"], "takes a size"),
    (["set-meta", "MODEL", "a=int:1", "-o", "MODEL"], "exists; use --force"),
    (["split", "MODEL", "missing/OUT"], "there is no folder missing"),
    (["merge", "MODEL", "OUT"], "is in one piece already"),
    (["merge", "missing.gguf", "OUT"], "missing.gguf"),
    (["set-meta", "MODEL", "a=str:b"], "give one of -o OUT.gguf and --in-place"),
    (["set-meta", "MODEL", "-o", "OUT"], "nothing is to be changed"),
    (["set-meta", "MODEL", "a=b", "-o", "OUT"], "set-meta takes KEY=TYPE:VALUE"),
    (["set-meta", "MODEL", "--file", "a=missing.txt", "-o", "OUT"], "missing.txt"),
    (["hash", "MODEL", "--check", "missing.txt"], "manifest cannot be read"),
])  # fmt: skip
def test_refusals(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert run([model if word == "MODEL" else word for word in arguments]) == 2
    out, err = capsys.readouterr()
    assert said in err and err.count("\n") == 1 and not out
    assert not any(tmp_path.iterdir())


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kills", [6, pytest.param(100, marks=pytest.mark.slow)])
def test_kill_merge(tiny_model: Callable[..., Path], tmp_path: Path, kills: int) -> None:
    model = tiny_model("llama", n_layers=12, n_embd=512, n_ff=1536)
    assert run(["split", str(model), str(tmp_path / "m"), "--max-tensors", "30"]) == 0
    folder = tmp_path / "out"
    folder.mkdir()
    first = next(tmp_path.glob("m-00001*"))
    killed.check(["merge", str(first), str(folder / "whole.gguf")], folder, kills)
