"""The flags of samplers and of structured output, as llama.cpp spells them; --batch."""

import json
import math

import pytest

from edgellm.cli._sampling import FLAGS, Sampling
from edgellm.cli.main import run
from edgellm.errors import EdgeLLMError
from edgellm.samplers.names import ORDER


@pytest.mark.parametrize(
    "flags, field, value",
    [
        (["--samplers", "top_k;temperature"], "samplers", ("top_k", "temperature")),
        (["--sampler-seq", "kt"], "samplers", ("top_k", "temperature")),
        (["--sampling-seq", "edskypmxt"], "samplers", ORDER),
        ([], "samplers", ORDER),
        (["--top-nsigma", "1.5"], "top_n_sigma", 1.5),
        (["--top-n-sigma", "1.5"], "top_n_sigma", 1.5),
        (["--typical", "0.9"], "typical_p", 0.9),
        (["--xtc-probability", "0.5"], "xtc_probability", 0.5),
        (["--xtc-threshold", "0.2"], "xtc_threshold", 0.2),
        (["--repeat-last-n", "-1"], "repeat_last_n", -1),
        (["--repeat-penalty", "1.1"], "repeat_penalty", 1.1),
        (["--presence-penalty", "-0.5"], "presence_penalty", -0.5),
        (["--frequency-penalty", "0.5"], "frequency_penalty", 0.5),
        (["--dry-multiplier", "0.8"], "dry_multiplier", 0.8),
        (["--dry-base", "2"], "dry_base", 2),
        (["--dry-allowed-length", "3"], "dry_allowed_length", 3),
        (["--dry-penalty-last-n", "-1"], "dry_penalty_last_n", -1),
        ([], "dry_sequence_breakers", ("\n", ":", '"', "*")),
        (
            ["--dry-sequence-breaker", "\\n", "--dry-sequence-breaker", "#"],
            "dry_sequence_breakers",
            ("\n", "#"),
        ),
        (["--dry-sequence-breaker", "none"], "dry_sequence_breakers", ()),
        (["--dynatemp-range", "0.3"], "dynatemp_range", 0.3),
        (["--dynatemp-exp", "2"], "dynatemp_exponent", 2),
        (["--mirostat", "2"], "mirostat", 2),
        (["--mirostat-lr", "0.2"], "mirostat_eta", 0.2),
        (["--mirostat-ent", "3"], "mirostat_tau", 3),
        (["-l", "15043+1", "-l", "2-inf"], "logit_bias", ((15043, 1.0), (2, -math.inf))),
        (["--logit-bias", " no-way-1.5"], "logit_bias", ((" no-way", -1.5),)),
        (["-j", '{"type": "object"}'], "json_schema", '{"type": "object"}'),
        (["-jf", "schema.json"], "json_schema", '{"type": "null"}'),
        (["--grammar", 'start: "a"'], "grammar", 'start: "a"'),
        (["--grammar-file", "g.lark"], "grammar", 'start: "b"'),
        (["--regex", "[a-z]+"], "regex", "[a-z]+"),
    ],
)
def test_flags_reach_the_engine(fake, tmp_path, flags, field, value):
    (tmp_path / "schema.json").write_text('{"type": "null"}')
    (tmp_path / "g.lark").write_text('start: "b"')
    assert run(["run", "m.gguf", "Hi", *flags]) == 0
    assert getattr(fake.SEEN["params"], field) == value


def test_gbnf_is_taken_with_a_word_of_warning(fake, capsys):
    assert run(["run", "m.gguf", "Hi", "--grammar", 'root ::= "a" | "b"']) == 0
    assert "GBNF" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, part",
    [
        (["--samplers", "top_k;infill"], "'infill'"),
        (["--sampler-seq", "kz"], "'z'"),
        (["--samplers", "top_k", "--sampler-seq", "k"], "--samplers and --sampler-seq"),
        (["--mirostat", "1"], "mirostat must be 0 or 2"),
        (["-l", "foo"], "--logit-bias"),
        (["-l", "2+inf"], "--logit-bias"),
        (["-j", '{"not": {}}'], "--json-schema) uses not"),
        (["-j", "{"], "not JSON"),
        (["-jf", "missing.json"], "missing.json"),
        (["-j", "{}", "-jf", "m.gguf"], "cannot both"),
        (["--grammar", "start: nothing"], "nothing"),
        (["--grammar", 'start: "a"', "--regex", "a"], "only one"),
        (["--regex", "(?=a)"], "--regex) uses look-around"),
        (["--repeat-penalty", "0"], "repeat_penalty must"),
        (["--batch", "in.jsonl"], "--batch"),
        (["--out", "out.jsonl"], "--out"),
        (["--batch", "in.jsonl", "--out", "o", "-p", "Hi"], "a prompt is given as well"),
        (["--batch", "missing.jsonl", "--out", "o"], "missing.jsonl"),
        (["--batch", "in.jsonl", "--out", "in.jsonl"], "it is the file of --batch"),
        (["--batch", "in.jsonl", "--out", "m.gguf"], "not an answer of a batch"),
        (["--batch", "in.jsonl", "--out", "o", "-np", "0"], "-np"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(fake, tmp_path, capsys, flags, part):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    prompt = [] if {"--batch", "--out"} & set(flags) else ["Hi"]
    assert run(["run", "m.gguf", *prompt, *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and part in err and err.count("\n") == 1 and "path" not in fake.SEEN


def test_a_chat_can_set_them():
    sampling = Sampling({flag.field: flag.default for flag in FLAGS})
    assert sampling.set("repeat-penalty", "1.2") == "repeat_penalty"
    assert sampling.set("samplers", "top_k;temp") == "samplers"
    assert sampling.set("logit_bias", "5-1") == "logit_bias"
    assert sampling.set("json_schema", "{}") == "json_schema"
    params = sampling.params()
    assert (params.repeat_penalty, params.samplers) == (1.2, ("top_k", "temperature"))
    assert params.logit_bias == ((5, -1.0),) and params.json_schema == "{}"
    for name, text in (("json_schema", '{"not": 1}'), ("logit_bias", "x"), ("mirostat", "1")):
        with pytest.raises(EdgeLLMError):
            sampling.set(name, text)
    assert sampling.params() == params
    sampling.set("json_schema", "")
    assert sampling.params().json_schema is None


def test_a_batch_from_the_command_line(tiny_model, tmp_path, capsys, monkeypatch):
    for name in ("EDGELLM_CTX_SIZE", "EDGELLM_SYSTEM"):
        monkeypatch.delenv(name, raising=False)
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    model = str(tiny_model("llama", template=template))
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bodies = [
        {"prompt": "Hi", "id": "a"},
        {"messages": [{"role": "user", "content": "Hi"}], "id": "b"},
        {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]},
    ]
    source.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    command = ["run", model, "--batch", str(source), "--out", str(out), "-n", "6", "-s", "1",
               "-c", "200", "-t", "1", "--ignore-eos"]  # fmt: skip
    assert run([*command, "-sys", "S"]) == 0
    stdout, err = capsys.readouterr()
    assert stdout == "" and "3 answered" in err
    found = [json.loads(line) for line in out.read_text().splitlines()]
    texts = {record["text"] for record in found}
    assert len(found) == 3 and len(texts) == 1  # all three are the same conversation
    assert run([*command, "-sys", "S"]) == 0
    assert "3 were there already" in capsys.readouterr().err
    assert len(out.read_text().splitlines()) == 3
    out.write_text("")
    source.write_text('{"prompt": "Hi"}\nbad\n')
    assert run([*command, "--raw"]) == 2
    err = capsys.readouterr().err
    assert "1 answered, 1 failed" in err and err.splitlines()[-1].startswith("edgellm: 1 line fail")
