"""edgellm pull, list, show and rm, and the completion of model names."""

import importlib.util
import json
import os
import pty
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from edgellm.cli import _model
from edgellm.cli.main import run

FAKE = Path(__file__).parent.parent / "edgellm" / "hub" / "fake.py"
_spec = importlib.util.spec_from_file_location("fake_hub", FAKE)
fake = importlib.util.module_from_spec(_spec)
sys.modules["fake_hub"] = fake  # dataclasses look their module up
_spec.loader.exec_module(fake)

TEMPLATE = "{{ messages }} \x1b[2J"


@pytest.fixture
def url(tmp_path, monkeypatch):
    """The address of a model; an empty cache and home."""
    for name in list(os.environ):
        if name.startswith(("EDGELLM_", "HF_", "OLLAMA", "LLAMA", "XDG_")) or "proxy" in name:
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("EDGELLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    server = fake.Server()
    server.files["/tiny-Q8_0.gguf"] = fake.gguf("Tiny \x1b[31m", 100_000, TEMPLATE)
    yield f"{server.url}/tiny-Q8_0.gguf"
    server.close()


@pytest.fixture
def pulled(url, capsys) -> str:
    assert run(["pull", url]) == 0
    out, err = capsys.readouterr()
    assert Path(out.strip()).name == "tiny-Q8_0.gguf"
    assert err == "Fetching tiny-Q8_0.gguf, 0 MB; this happens once.\n"
    return url


def test_pull_again_is_silent(pulled, capsys):
    assert run(["pull", pulled]) == 0
    assert capsys.readouterr().err == ""


def test_list(pulled, capsys):
    assert run(["list"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "SIZE", "QUANT", "ARCHITECTURE", "WHERE"]
    assert row.split() == [pulled, "100.0", "kB", "Q8_0", "llama", "edgellm"]


def test_list_json_and_all(pulled, capsys, tmp_path):
    folder = tmp_path / ".cache/llama.cpp"
    folder.mkdir(parents=True)
    (folder / "other.gguf").write_bytes(b"GGUF, but damaged")
    assert run(["list", "--all", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["name"], first["bytes"], first["error"]) == (pulled, 100_000, None)
    assert second["name"] == "llama.cpp:other.gguf" and "other.gguf" in second["error"]


def test_an_empty_list_says_what_to_do(url, capsys):
    assert run(["list"]) == 0
    out, err = capsys.readouterr()
    assert out == "" and "edgellm pull NAME" in err


def test_show(pulled, capsys):
    assert run(["show", pulled]) == 0
    out = capsys.readouterr().out
    for part in ("Tiny \\x1b[31m", "llama", "512 tokens", "Q8_0", "100.0 kB", "mit", "yes"):
        assert part in out
    assert "\x1b" not in out
    assert run(["show", "-m", pulled, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["template"] == TEMPLATE and facts["licence"] == "mit" and facts["parts"] == 1
    assert run(["show", pulled, "--template"]) == 0
    assert capsys.readouterr().out == TEMPLATE + "\n"
    assert run(["show", pulled, "--license"]) == 0
    assert capsys.readouterr().out == "mit\n"


def test_show_of_what_is_absent(url, capsys, tmp_path):
    assert run(["show"]) == 2
    assert "smollm2 is not on this machine: `edgellm pull smollm2`" in capsys.readouterr().err
    assert run(["show", "ann/x:Q4_0"]) == 2
    assert "`edgellm pull ann/x:Q4_0` fetches it" in capsys.readouterr().err
    (tmp_path / "bare.gguf").write_bytes(fake.gguf())
    assert run(["show", "bare.gguf", "--template"]) == 2
    assert "no chat template" in capsys.readouterr().err


def test_rm(pulled, capsys):
    assert run(["rm", "-y", pulled]) == 0
    assert "is removed, 100.0 kB freed" in capsys.readouterr().err
    assert run(["rm", pulled]) == 2
    assert "not among what edgellm has fetched" in capsys.readouterr().err


def test_rm_of_a_file_of_ones_own(url, capsys):
    Path("own.gguf").write_bytes(b"GGUF")
    assert run(["rm", "-y", "own.gguf"]) == 2
    assert "delete it yourself" in capsys.readouterr().err and Path("own.gguf").exists()


@pytest.mark.parametrize(("answer", "stays"), [("n", True), ("y", False)])
def test_rm_asks_on_a_terminal(pulled, answer, stays):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "edgellm", "rm", pulled]
    with subprocess.Popen(command, stdin=theirs, stderr=subprocess.PIPE, text=True) as process:
        os.write(ours, f"{answer}\n".encode())
        err = process.communicate(timeout=60)[1]
    assert f"Remove {pulled} (100.0 kB)?" in err and ("is kept" in err) == stays
    assert bool(list(Path("cache/models/url").glob("*/*.gguf"))) == stays


def test_a_refusal_is_one_sentence(url, capsys):
    assert run(["pull", url.replace("tiny-", "other-")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "other-Q8_0.gguf is not there (HTTP 404)" in err


def test_progress_on_a_terminal(url):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "edgellm", "pull", url]
    done = subprocess.run(command, stderr=theirs, stdout=subprocess.PIPE, timeout=60)
    shown = os.read(ours, 1 << 16).decode()
    assert done.returncode == 0 and "Fetching tiny-Q8_0.gguf" in shown and "100.0/100.0 kB" in shown


def test_names_and_files_are_completed(pulled, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x.gguf").write_bytes(b"")
    (tmp_path / "mine" / "x.txt").write_bytes(b"")
    (tmp_path / "my.gguf").write_bytes(b"")
    assert "smollm2" in _model.complete("smol") and pulled in _model.complete("http")
    assert sorted(_model.complete("m")) == ["mine/", "my.gguf"]
    assert _model.complete("mine/") == ["mine/x.gguf"]
    assert _model.complete(f"{tmp_path}/my") == [f"{tmp_path}/my.gguf"]
    assert _model.complete("absent/") == []


def completed(words: str) -> list[str]:
    settings = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    settings["_EDGELLM_COMPLETE"] = "complete_bash"
    code = "from edgellm.cli.main import main; main()"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=60
    )
    return done.stdout.split()


def test_the_shell_completes_commands_flags_and_models(url):
    assert completed("edgellm pu") == ["pull"]
    assert completed("edgellm run --pro") == ["--prompt"]
    assert completed("edgellm show smollm2-") == ["smollm2-1.7b", "smollm2-360m"]
    assert completed("edgellm run -m gemma3-1") == ["gemma3-1b"]


def test_completion_and_known_names_load_nothing_heavy(pulled):
    code = (
        "import sys; from edgellm.cli._model import complete; from edgellm.hub import find; "
        f"complete(''); find({pulled!r}); "
        "print({'numpy', 'rich', 'huggingface_hub', 'urllib.request'} & set(sys.modules) or '')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "" and done.returncode == 0, done.stdout + done.stderr


def in_bash(flag):
    """The shell is found among the processes that the command was started from."""
    line = f"{shlex.quote(sys.executable)} -m edgellm {flag}; exit $?"
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)


def test_show_completion(url):
    done = in_bash("--show-completion")
    assert done.returncode == 0 and "_EDGELLM_COMPLETE=complete_bash" in done.stdout


def test_install_completion(url, tmp_path):
    assert in_bash("--install-completion").returncode == 0
    assert ".bash_completions/edgellm.sh" in (tmp_path / ".bashrc").read_text()
