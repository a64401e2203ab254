"""edgellm draft-check, on tiny models."""

import json

from edgellm.cli.main import run


def test_a_model_suits_itself(tiny_model, tmp_path, capsys):
    path, prompts = str(tiny_model("llama")), tmp_path / "prompts.txt"
    prompts.write_text("one\n\ntwo\n")
    command = ["draft-check", path, path, "-f", str(prompts), "-n", "16", "-c", "256"]
    assert run([*command, "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["n_prompts"] == 2 and found["rates"] == [1.0] * len(found["rates"])
    assert run(command) == 0
    text = capsys.readouterr().out
    assert "Vocabularies match (258 tokens)." in text and "100 %" in text


def test_what_cannot_be_compared_is_said(tiny_model, tmp_path, capsys):
    path, prompts = str(tiny_model("llama")), tmp_path / "prompts.txt"
    prompts.write_text("\n")
    other = str(tiny_model("llama", controls=("<|more|>",)))
    assert run(["draft-check", path, other]) == 2
    assert "prompts are needed" in capsys.readouterr().err
    assert run(["draft-check", path, other, "-f", str(prompts)]) == 2
    assert "has no prompt" in capsys.readouterr().err
    prompts.write_text("one")
    assert run(["draft-check", path, other, "-f", str(prompts)]) == 2
    error = capsys.readouterr().err
    assert "Only the draft model (-md) has the token '<|more|>'" in error
    assert "Traceback" not in error
