"""`edgellm chat --server` and `edgellm ps` with a real server."""

import io
import json
import sys

import pytest

from edgellm import SamplingParams
from edgellm.cli.main import run
from edgellm.errors import EdgeLLMError
from edgellm.remote import RemoteModel, RemoteTalk, asked
from edgellm.server.safety import Guard

SHORT = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def locked(start):
    return start(guard=Guard(keys=("secret",)), n_ctx=512)


def piped(monkeypatch, text):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def test_a_talk_goes_on_as_one_with_the_server(server):
    talk = RemoteTalk(RemoteModel(server.url), "Be brief.")
    assert talk.model.names == ["tiny"] and talk.model.n_ctx == 512
    first = "".join(part.text for part in talk.ask("Hello", SHORT))
    assert talk.last.n_answer == 6 and talk.last.is_kept and talk.last.finish_reason == "length"
    assert talk.messages == [
        {"role": "user", "content": "Hello"}, {"role": "assistant", "content": first},
    ]  # fmt: skip
    body = {"messages": [{"role": "system", "content": "Be brief."}, talk.messages[0]],
            "max_tokens": 6, "temperature": 0, "ignore_eos": True}  # fmt: skip
    answer = server.post("/v1/chat/completions", body).json()
    assert answer["choices"][0]["message"]["content"] == first
    assert talk.n_tokens == answer["usage"]["total_tokens"]
    assert talk.last.timings["predicted_n"] == 6
    list(talk.ask("More", SHORT))
    assert len(talk.messages) == 4 and talk.n_tokens > answer["usage"]["total_tokens"]
    again = "".join(part.text for part in talk.regenerate(SHORT))
    assert talk.messages[-1]["content"] == again and len(talk.messages) == 4
    assert talk.undo() == "More" and len(talk.messages) == 2


def test_leaving_an_answer_frees_the_server_and_keeps_what_came(server):
    talk = RemoteTalk(RemoteModel(server.url))
    parts = talk.ask("Hello", SamplingParams(max_tokens=400, ignore_eos=True))
    next(parts)
    parts.close()
    server.until(server.is_idle)
    assert talk.last.is_kept and talk.last.finish_reason is None and talk.messages[1]["content"]


def test_a_full_context_is_known(server):
    talk = RemoteTalk(RemoteModel(server.url))
    list(talk.ask("Hello", SamplingParams(max_tokens=None, ignore_eos=True)))
    assert talk.last.context_full and talk.n_tokens == 512


def test_what_a_server_refuses_is_one_sentence_and_nothing_is_lost(server):
    talk = RemoteTalk(RemoteModel(server.url))
    list(talk.ask("Hello", SHORT))
    before = list(talk.messages)
    with pytest.raises(EdgeLLMError, match="answered 400: .*context"):
        list(talk.ask("word " * 2000, SHORT))
    assert talk.messages == before
    with pytest.raises(EdgeLLMError, match="no model 'other'; it has tiny"):
        RemoteModel(server.url, "other")
    with pytest.raises(EdgeLLMError, match="No server answers at http://127.0.0.1:9"):
        RemoteModel("http://127.0.0.1:9")
    with pytest.raises(EdgeLLMError, match="begins with http"):
        RemoteModel("127.0.0.1:8080")


def test_only_what_differs_is_asked():
    assert asked(SamplingParams(max_tokens=None)) == {}
    found = asked(SamplingParams(max_tokens=5, temperature=0.2, stop=["x"], logit_bias={3: -1.0}))
    assert found == {
        "max_tokens": 5, "temperature": 0.2, "stop": ["x"], "logit_bias": {"3": -1.0},
    }  # fmt: skip
    json.dumps(asked(SamplingParams(samplers="top_k;temperature", json_schema={"type": "object"})))


def test_piped_text_is_answered(server, monkeypatch, capsys):
    piped(monkeypatch, "Hello")
    flags = ["--server", server.url + "/v1/", "-n", "6", "--temp", "0", "--ignore-eos"]
    assert run(["chat", *flags]) == 0
    out, err = capsys.readouterr()
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6, "temperature": 0,
            "ignore_eos": True}  # fmt: skip
    said = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert out.rstrip("\n") == said.rstrip("\n") and "tokens/s" in err


def test_keys_are_sent(locked, monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    piped(monkeypatch, "Hello")
    assert run(["chat", "--server", locked.url]) == 2
    assert "wants an API key: --api-key-file" in capsys.readouterr().err
    assert run(["ps", locked.url]) == 2
    capsys.readouterr()
    key = tmp_path / "key"
    key.write_text("secret\n")
    piped(monkeypatch, "Hello")
    assert run(["chat", "--server", locked.url, "-n", "3", "--api-key-file", str(key)]) == 0
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert run(["ps", locked.url]) == 0


def test_ps_shows_what_runs(server, capsys):
    assert run(["ps", server.url]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["model", "state", "running", "waiting", "tokens/s", "cache", "context"]
    assert line.split()[:5] == ["tiny", "ready", "0", "of", "4"] and line.endswith("512")
    assert run(["ps", server.url, "--json"]) == 0
    [model] = json.loads(capsys.readouterr().out)
    assert model["name"] == "tiny" and model["running"] == 0 and model["generated"] > 0
    assert run(["ps", "http://127.0.0.1:9"]) == 2
    assert "No server answers" in capsys.readouterr().err
