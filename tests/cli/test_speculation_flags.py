"""The flags of speculation, as llama.cpp spells and spelled them."""

from pathlib import Path

import pytest

from edgellm.cli.main import run
from edgellm.hub.catalogue import catalogue


@pytest.mark.parametrize(
    "flags, field, value",
    [
        ([], "kind", "none"),
        (["--spec-type", "lookup"], "kind", "lookup"),
        (["--spec-type", "ngram-simple"], "kind", "lookup"),
        (["--spec-type", "draft-simple", "-md", "d.gguf"], "kind", "draft"),
        (["--spec-type", "none,draft-simple", "-md", "d.gguf"], "kind", "draft"),
        (["--spec-type", "ngram-mod,draft-simple", "-md", "d.gguf"], "kind", "auto"),
        (["-md", "d.gguf"], "kind", "auto"),
        (["--spec-draft-model", "d.gguf"], "model", "d.gguf"),
        (["--spec-type", "none", "-md", "d.gguf"], "model", None),
        (["--draft", "5"], "n_max", 5),
        (["--draft-max", "5"], "n_max", 5),
        (["--spec-draft-n-max", "5"], "n_max", 5),
        (["--draft-min", "2"], "n_min", 2),
        (["--spec-draft-n-min", "2"], "n_min", 2),
        (["--draft-p-min", "0.4"], "p_min", 0.4),
        (["--spec-draft-p-min", "0.4"], "p_min", 0.4),
        (["-td", "3"], "n_threads", 3),
        (["--draft-cores", "0x2"], "cores", "0x2"),
        (["-ngld", "4"], "n_gpu_layers", 4),
        (["-ctkd", "q8_0"], "type_k", "q8_0"),
        (["-ctvd", "q4_0"], "type_v", "q4_0"),
    ],
)
def test_flags_reach_the_engine(fake, flags, field, value):
    Path("d.gguf").write_bytes(b"GGUF")
    assert run(["run", "m.gguf", "Hi", *flags]) == 0
    assert getattr(fake.SEEN["speculation"], field) == value


def test_a_chat_looks_up_by_itself(fake, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert run(["chat", "m.gguf"]) == 0
    assert fake.SEEN["speculation"].kind == "auto"
    assert run(["chat", "m.gguf", "--spec-type", "none"]) == 0
    assert fake.SEEN["speculation"].kind == "none"


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--spec-type", "fast"], "must be none, lookup, draft, auto, not 'fast'"),
        (["--spec-type", "lookup,draft-mtp"], "not 'draft-mtp'"),
        (["--spec-type", "ngram-"], "not 'ngram-'"),
        (["--spec-type", "draft"], "needs a draft model (-md, --model-draft)"),
        (["--draft-max", "0"], "--draft-max must be 1 to 60 tokens, not 0"),
        (["--draft-min", "9", "--draft-max", "4"], "--draft-min must be 0 to --draft-max (4)"),
        (["-ctkd", "q5"], "is none of"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_loaded(fake, capsys, flags, words):
    fake.SEEN.clear()
    assert run(["run", "m.gguf", "Hi", *flags]) == 2
    assert words in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "path" not in fake.SEEN


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--draft-cores", "zz", "-ngld", "3"],
         "There is no draft model (-md): --gpu-layers-draft, --draft-cores changes nothing."),
        (["--spec-type", "lookup", "-md", "d.gguf"],
         "--spec-type lookup uses no draft model (-md): --model-draft changes nothing."),
        (["-md", "d.gguf", "-td", "3"], ""),
        (["--spec-type", "lookup", "--draft-max", "3"], ""),
    ],
)  # fmt: skip
def test_flags_of_a_draft_model_that_is_not_used_say_so(fake, capsys, flags, words):
    Path("d.gguf").write_bytes(b"GGUF")
    assert run(["run", "m.gguf", "Hi", *flags]) == 0
    error = " ".join(capsys.readouterr().err.split())
    assert words in error if words else "changes nothing" not in error


def test_auto_is_the_catalogues_draft_model(fake, monkeypatch, capsys):
    """The pair is that of the entry whose file the target is."""
    path, files = Path("big.gguf").resolve(), {"qwen2.5-coder-1.5b": Path("big.gguf").resolve()}
    monkeypatch.setattr("edgellm.hub.sources.find_entry", lambda entry: files.get(entry.name))
    path.write_bytes(b"GGUF")
    command = ["run", str(path), "Hi", "-md", "auto"]
    Path("small.gguf").write_bytes(b"GGUF")
    files["qwen2.5-coder-0.5b"] = Path("small.gguf").resolve()
    assert run(command) == 0
    assert fake.SEEN["speculation"].model == str(files["qwen2.5-coder-0.5b"])
    files.clear()
    assert run(command) == 2
    error = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "the catalogue has no draft model for big.gguf" in error


def test_drafts_of_the_catalogue_are_in_it():
    entries = catalogue()[1]
    assert {e.draft for e in entries.values() if e.draft} <= entries.keys()


def test_a_draft_model_does_not_go_with_a_folder_of_models(tmp_path, capsys):
    (tmp_path / "d.gguf").write_bytes(b"GGUF")
    command = ["serve", "--models-dir", str(tmp_path), "-md", str(tmp_path / "d.gguf")]
    assert run(command) == 2
    assert "--models-dir serves several" in " ".join(capsys.readouterr().err.split())


def test_a_mask_of_draft_cores_is_named(tiny_model, capsys):
    path = str(tiny_model("llama"))
    assert run(["run", path, "Hi", "-md", path, "--draft-cores", "zz"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "The CPU mask 'zz'" in error and "(--draft-cores)" in error
