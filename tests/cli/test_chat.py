"""edgellm chat on a pseudo-terminal, with a fake engine and with a real one."""

import io
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

pty = pytest.importorskip("pty", reason="no pseudo-terminals here")
pytest.importorskip("pyte")

sys.path.insert(0, str(Path(__file__).parent))
from terminal import REAL_CODE, Terminal, chat_code  # noqa: E402

from edgellm.cli.main import run  # noqa: E402


@pytest.fixture
def start(tmp_path):
    """Starts a chat; ends all of them."""
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    open_ones = []

    def begin(*arguments: str, setup: str = "pass", code: str | None = None, **options) -> Terminal:
        env = {"EDGELLM_CACHE": str(tmp_path / "cache"), **options.pop("env", {})}
        model = () if code else ("chat", "m.gguf")
        terminal = Terminal(
            code or chat_code(setup), *model, *arguments, env=env, cwd=tmp_path, **options
        )
        open_ones.append(terminal)
        return terminal

    yield begin
    for terminal in open_ones:
        terminal.close()


def test_a_whole_chat(start, tmp_path):
    chat = start("-sys", "Be brief.")
    chat.wait("Fake 1B, 8,192 tokens of context; /? for help")
    chat.wait("Ask something")
    chat.send("Hello")
    chat.wait("Turn 1: you said 'Hello'")
    chat.wait("5 tokens, 100.0 tokens/s")
    chat.send('"""one')
    chat.send("two")
    chat.send('three"""')
    chat.wait("Turn 2: you said 'one\\ntwo\\nthree'")
    chat.send("first \\")
    chat.send("second")
    chat.wait("you said 'first \\nsecond'")
    chat.send("/undo")
    chat.wait("Taken back: first second")
    chat.send("again")
    chat.wait("Turn 3: you said 'again'")
    chat.send("/clear")
    chat.wait("A new conversation")
    chat.send("", "up")  # history
    chat.settle()
    chat.send("", "up")
    chat.send("")
    chat.wait("Turn 1: you said 'again'")
    chat.send("", "ctrl-c")
    chat.wait("Ctrl-D or /bye leaves")
    chat.send("", "ctrl-d")
    assert chat.ended() == 0
    assert "Traceback" not in chat.text
    history = tmp_path / "cache" / "history" / "chat"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert "+Hello" in history.read_text()


def test_ctrl_c_keeps_what_came_and_regen_answers_again(start):
    chat = start("--seed", "7", setup="fake_llm.LLM.pause = 0.01")
    chat.wait("Ask something")
    chat.send("count please")
    chat.wait("12 13 14")
    chat.send("", "ctrl-c")
    chat.wait("Stopped after")
    chat.send("go on")
    chat.wait("Turn 2: you said 'go on', seed 7.")
    chat.send("/regen")
    chat.wait("Turn 2: you said 'go on', seed 8.")
    chat.send("/edit else")
    chat.wait("Turn 2: you said 'else', seed 7.")
    chat.send("/history")
    chat.wait("assistant: 1 2 3")
    chat.send("/bye")
    assert chat.ended() == 0


def test_a_stop_before_the_first_word_takes_the_message_back(start):
    chat = start(setup="fake_llm.LLM.pause = 10")
    chat.wait("Ask something")
    chat.send("slow")
    chat.settle(1.0)
    chat.type("\x03")
    chat.wait("your message is taken back")
    chat.send("/stats")
    chat.wait("messages  0")
    chat.send("/quit")
    assert chat.ended() == 0


def test_sessions_resume(start, tmp_path):
    first = start("--session", "trip")
    first.wait("Ask something")
    first.send("Hello")
    first.wait("tokens/s")
    first.send("/bye")
    assert first.ended() == 0
    path = tmp_path / "cache" / "sessions" / "trip.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    state = json.loads(path.read_text())
    assert [m["role"] for m in state["messages"]] == ["user", "assistant"]
    assert state["seen"]["tokens"][-1] >= 0x200000  # the very tokens that were generated
    cache = path.with_suffix(".kv")
    assert cache.read_text() == str(state["seen"]["tokens"])  # what need not be read again
    cache.write_text("other")
    again = start("--session", "trip")
    again.wait("by another model.")
    again.wait("The conversation is read again")
    again.wait("Session trip: 2 messages")
    again.wait("> Hello")
    again.send("More")
    again.wait("Turn 2: you said 'More'")
    again.send("/save copy")
    again.wait("Saved; /load copy")
    again.send("/clear")
    again.wait("new conversation")
    again.send("/load copy")
    again.wait("Session copy: 4 messages")
    again.send("/load nothing.gguf")
    again.wait("nothing.gguf")
    again.send("/model other.gguf")
    again.wait("the conversation goes on")
    again.send("Still there?")
    again.wait("Turn 3: you said 'Still there?'")
    again.send("/bye")
    assert again.ended() == 0


def test_markdown_is_drawn_once_and_well(start):
    chat = start(setup="fake_llm.LLM.pause = 0.004")
    chat.wait("Ask something")
    chat.send("markdown")
    chat.wait("100.0 tokens/s")
    assert "**" not in chat.text and "```" not in chat.text
    for part in ("Tea", "Some bold words", "1 First boil", "def brew(cups: int) -> str:", "green",
                 "That is all there is.", "https://example.org/a"):  # fmt: skip
        assert chat.text.count(part) == 1, part
    assert "\x1b]8" not in chat.raw  # nothing can be clicked
    assert chat.raw.count("\x1b[2J") == 0  # nothing is cleared while it is drawn
    assert len(chat.colors) > 2


def test_an_answer_longer_than_the_screen(start):
    chat = start(rows=12, setup="fake_llm.LLM.pause = 0.003")
    chat.wait("Ask something")
    chat.send("code")
    chat.wait("Done.")
    chat.wait("tokens/s")
    shown = [line.strip() for line in chat.lines if line.strip().startswith("line ")]
    assert shown == [f"line {n}" for n in range(60)]


def test_a_long_prompt_is_announced(start):
    chat = start(setup="fake_llm.LLM.pause = 0.3")
    chat.wait("Ask something")
    chat.send("x" * 500)
    chat.wait("Reading 5")
    chat.wait("Turn 1")
    assert "Reading" not in chat.text


def test_a_narrow_screen(start):
    chat = start(columns=40, rows=20)
    chat.wait("Ask something")
    chat.send("markdown")
    chat.wait("5 tokens, 100.0 tokens/s")
    assert "That is all there is." in chat.text
    chat.send("/help")
    chat.wait("Ctrl-C stops")
    chat.send("/stats")
    chat.wait("messages")
    assert all(len(line) <= 40 for line in chat.lines)
    chat.send("/bye")
    assert chat.ended() == 0


@pytest.mark.parametrize(
    "arguments, env", [((), {"NO_COLOR": "1"}), (("--color", "off"), {}), (("-co", "off"), {})]
)
def test_without_colors(start, arguments, env):
    chat = start(*arguments, env=env)
    chat.wait("Ask something")
    chat.send("markdown")
    chat.wait("100.0 tokens/s")
    chat.send("/nonsense")
    chat.wait("There is no command /nonsense.")
    assert chat.colors <= {"default"}


@pytest.mark.parametrize("arguments, env", [((), {"TERM": "dumb"}), (("--simple-io",), {})])
def test_a_terminal_that_can_only_print(start, arguments, env):
    chat = start(*arguments, env=env)
    chat.wait("\n>")
    chat.send("think")
    chat.wait("tokens/s")
    chat.send("one \\")
    chat.send("two")
    chat.wait("you said 'one \\ntwo'")
    chat.send("", "ctrl-d")
    assert chat.ended() == 0
    assert "\x1b" not in chat.raw
    assert (
        "[thinking]\nLet me see." in chat.text and "[answer]\nThe answer is **four**." in chat.text
    )


def test_thinking_is_dim_and_can_be_folded(start):
    chat = start()
    chat.wait("Ask something")
    chat.send("think")
    chat.wait("tokens/s")
    assert "<think>" not in chat.text and "  Let me see." in chat.text
    assert "The answer is four." in chat.text
    chat.send("/set hidethinking")
    chat.wait("folded")
    chat.send("/clear")
    chat.settle()
    chat.send("think again")
    chat.wait("Thought for 0.")
    chat.wait("tokens/s", times=2)
    assert chat.text.count("Let me see.") == 1
    chat.send("/history")
    chat.settle()
    assert "Let me see." not in chat.text.partition("user: think again")[2]


def test_a_template_that_opens_the_thought_itself(start):
    setup = (
        "fake_llm.LLM.chat_template += '<think>\\n'; "
        "fake_llm.LLM.answer = lambda self, p: ['Hm', 'm.\\n</th', 'ink>\\n\\nFour.']"
    )
    chat = start("--hide-thinking", setup=setup)
    chat.wait("Ask something")
    chat.send("What?")
    chat.wait("Four.")
    chat.wait("Thought for")
    assert "Hmm" not in chat.text


def test_control_sequences_of_the_model_do_nothing(start):
    chat = start()
    chat.wait("Ask something")
    chat.send("evil")
    chat.wait("end")
    chat.wait("tokens/s")
    assert "a\\x1b[2Jb" in chat.text.replace("\n", "")
    assert "\x1b]0;" not in chat.raw and "\x1b[2Jb" not in chat.raw and "\x9b" not in chat.raw


def test_multiline_mode(start):
    chat = start("-mli")
    chat.wait("Ask something")
    chat.send("one")
    chat.send("two")
    chat.send("")
    chat.wait("you said 'one\\ntwo'")
    chat.send("three")
    chat.send("four", "alt-enter")
    chat.wait("you said 'three\\nfour'")
    chat.send("/set nomultiline")
    chat.wait("Enter sends")
    chat.send("five")
    chat.wait("you said 'five'")


def test_completion_and_files(start, tmp_path):
    (tmp_path / "notes.txt").write_text("milk, eggs")
    chat = start()
    chat.wait("Ask something")
    chat.send("/rege", "tab")
    chat.settle()
    assert "/regen" in chat.text
    chat.type("\x15")
    chat.send("/read notes.txt")
    chat.wait("10 characters go with your next message")
    chat.send("What is it?")
    chat.wait("milk, eggs")
    chat.send("/read absent.txt")
    chat.wait("absent.txt cannot be read")
    chat.send("/read m.gguf")
    chat.wait("4 characters")


def test_settings(start):
    chat = start("--temp", "0.5")
    chat.wait("Ask something")
    for line, shown in {
        "/temperature": "temperature is 0.5",
        "/temperature 0.1": "temperature is now 0.1",
        "/temp hot": "temp must be a number, not 'hot'",
        "/top_p 3": "top_p must be between 0 and 1",
        "/set parameter num_predict 7": "max_tokens is now 7",
        "/set parameter nonsense 1": "There is no parameter 'nonsense'",
        "/set system You are a pirate.": "Set; a new conversation.",
        "/system": "You are a pirate.",
        "/set quiet": "The speed line is off.",
        "/set nothink": "Thinking is off",
        "/show parameters": "0.95",
        "/show template": "endfor",
        "/show license": "does not name its licence",
        "/show info": "8,192 tokens of context",
        "/show nonsense": "/show knows",
        "/image x.png": "Images cannot be sent",
        "/regen": "There is no message yet.",
        "/exot": "Did you mean /exit?",
        "/help regen": "The same: /regenerate, /retry",
        "/glob *.nothing": "No file matches",
        "//slash": "you said '/slash'",
    }.items():
        chat.send(line)
        chat.wait(shown)
    assert "Traceback" not in chat.text
    chat.send("/exit")
    assert chat.ended() == 0


def test_a_conversation_that_grows_too_long(start):
    chat = start(setup="fake_llm.LLM.n_ctx = 60")
    chat.wait("Ask something")
    chat.send("Hello")
    chat.wait("100.0 tokens/s")
    chat.send("x" * 30)
    chat.wait("/undo takes the last exchange back")
    chat.send("/stats")
    chat.wait("messages  2")
    chat.send("/clear")
    chat.send("y" * 70)
    chat.wait("shorten it")


def test_a_first_message_and_one_turn(start):
    chat = start("-p", "Hello", "-st")
    chat.wait("Turn 1: you said 'Hello'")
    assert chat.ended() == 0


# ---- without a terminal ----------------------------------------------------------------------


def piped(tmp_path, text: str, *arguments: str, setup: str = "pass") -> subprocess.CompletedProcess:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    env = {k: v for k, v in os.environ.items() if not k.startswith("EDGELLM_")}
    return subprocess.run(
        [sys.executable, "-c", chat_code(setup), "chat", *arguments],
        input=text,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=env | {"EDGELLM_CACHE": str(tmp_path / "cache")},
        timeout=60,
    )


def test_piped_input_is_answered(tmp_path):
    done = piped(tmp_path, "Hello\n", "m.gguf")
    assert done.stdout == "Turn 1: you said 'Hello', seed -1.\n"
    assert done.returncode == 0
    assert "tokens/s" in done.stderr and "\x1b" not in done.stdout + done.stderr
    done = piped(tmp_path, "the text", "m.gguf", "-p", "Summarise", "--no-show-timings")
    assert "'Summarise\\n\\nthe text'" in done.stdout
    assert "tokens/s" not in done.stderr


def test_thinking_does_not_go_to_stdout(tmp_path):
    done = piped(tmp_path, "think", "m.gguf")
    assert done.stdout == "The answer is **four**.\n"
    assert "Let me see." in done.stderr
    assert "Let me see." not in piped(tmp_path, "think", "m.gguf", "--hide-thinking").stderr


def test_nothing_piped_greets_the_model(tmp_path):
    done = piped(tmp_path, "", "m.gguf")
    assert done.returncode == 0
    assert "you said 'Hello!'" in done.stdout
    assert "Nothing was piped in" in done.stderr


def test_a_session_without_a_terminal(tmp_path):
    piped(tmp_path, "One", "m.gguf", "--session", "s")
    assert "Turn 2: you said 'Two'" in piped(tmp_path, "Two", "m.gguf", "--session", "s").stdout


@pytest.mark.parametrize(
    "arguments, says, setup",
    [
        (["--session", "../x"], "cannot be the name of a session", "pass"),
        (["--chat-template", "nonsense"], "There is no chat template 'nonsense'", "pass"),
        (["--chat-template", "absent.jinja"], "cannot be read", "pass"),
        (["--chat-template-kwargs", "[1]"], "--chat-template-kwargs", "pass"),
        (["--reasoning", "maybe"], "auto, on or off", "pass"),
        (["--temp", "-1"], "--temp", "pass"),
        (["--color", "pink"], "--color", "pass"),
        ([], "edgellm run --raw", "fake_llm.LLM.chat_template = None"),
        ([], "cannot be read, line 1", "fake_llm.LLM.chat_template = '{% if %}'"),
    ],
)
def test_what_cannot_be_is_one_sentence(tmp_path, arguments, says, setup):
    done = piped(tmp_path, "Hi", "m.gguf", *arguments, setup=setup)
    assert done.returncode == 2
    assert done.stdout == ""
    assert says in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


def test_a_damaged_session_is_said(tmp_path):
    folder = tmp_path / "cache" / "sessions"
    folder.mkdir(parents=True)
    for text in ("{", "[]", '{"messages": [1]}', '{"messages": [], "seen": {"tokens": ["a"]}}'):
        (folder / "s.json").write_text(text)
        done = piped(tmp_path, "Hi", "m.gguf", "--session", "s")
        assert done.returncode == 2 and "is damaged" in done.stderr


def test_a_base_model_can_be_given_a_template(tmp_path):
    setup = "fake_llm.LLM.chat_template = None"
    done = piped(tmp_path, "Hi", "m.gguf", "--chat-template", "plain", setup=setup)
    assert done.returncode == 0, done.stderr
    assert "Assistant:" in done.stdout  # the fake repeats what it was asked


# ---- with a real model -----------------------------------------------------------------------


@pytest.fixture
def real(real_model, start, tmp_path):
    """Starts a chat with SmolLM2."""
    path = str(real_model("SmolLM2"))
    store = os.environ.get("EDGELLM_KERNEL_STORE")
    env = {"EDGELLM_KERNEL_STORE": store} if store else {}

    def begin(*arguments: str, **options) -> Terminal:
        return start("chat", path, "--seed", "5", *arguments, code=REAL_CODE, env=env, **options)

    return begin


def saved(tmp_path: Path, name: str) -> dict:
    return json.loads((tmp_path / "cache" / "sessions" / f"{name}.json").read_text())


@pytest.mark.real
def test_a_real_chat_on_a_narrow_screen(real, tmp_path):
    chat = real("--session", "long", "-c", "1024", columns=40)
    chat.wait("Ask something", 120)
    chat.send('"""Write a long story about')
    chat.send('a lighthouse."""')
    chat.wait("lighthouse", times=2, seconds=60)
    chat.settle(1.0)
    chat.type("\x03")
    chat.wait("Stopped after")
    first = saved(tmp_path, "long")["messages"]
    assert first[0]["content"] == "Write a long story about\na lighthouse."
    assert len(first[1]["content"]) > 20
    chat.send("/temperature 0")
    chat.send("/set parameter n 12")
    chat.send("/regen")
    chat.wait("12 tokens,", 60)
    again = saved(tmp_path, "long")["messages"]
    assert again[0] == first[0] and again[1] != first[1]
    chat.send("/bye")
    assert chat.ended() == 0
    assert all(len(line) <= 40 for line in chat.lines) and "Traceback" not in chat.text
    resumed = real("--session", "long", "-c", "1024", columns=40)
    resumed.wait("Session long: 2 messages", 60)
    resumed.send("", "ctrl-d")
    assert resumed.ended() == 0


@pytest.mark.real
def test_a_resumed_session_goes_on_with_the_very_tokens(real, tmp_path):
    questions = ("Name three colours.", "And <|im_end|> three animals?")

    def talk(name: str, *asked: str) -> None:
        chat = real("--session", name, "-n", "24", "--no-show-timings", "-c", "1024")
        chat.wait("Ask something", 120)
        for question in asked:
            before = path.stat().st_mtime_ns if (path := session_path(name)).exists() else 0
            chat.send(question)
            while not path.exists() or path.stat().st_mtime_ns == before:
                assert chat.read(0.05) and "Traceback" not in chat.text
            chat.settle()
        chat.send("/bye")
        assert chat.ended() == 0

    def session_path(name: str) -> Path:
        return tmp_path / "cache" / "sessions" / f"{name}.json"

    talk("whole", *questions)
    talk("parts", questions[0])
    talk("parts", questions[1])
    whole, parts = saved(tmp_path, "whole"), saved(tmp_path, "parts")
    assert whole["seen"]["tokens"] == parts["seen"]["tokens"]
    assert whole["messages"] == parts["messages"]
    ends = [token for token in whole["seen"]["tokens"] if token == 2]  # <|im_end|>
    assert len(ends) == 4  # of system, two questions and one answer: none that a user wrote


def test_flags_of_the_engine_beside_a_server_are_said_to_be_unused(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Hi")))
    url = "http://127.0.0.1:9"  # nobody is there
    assert run(["chat", "--server", url, "-ngl", "3", "-ot", "ffn=cpu", "--placement", "-md",
                "d", "--spec-type", "draft"]) != 0  # fmt: skip
    said = (
        "What runs on a GPU is the server's to choose: --ngl, --override-tensor, --placement "
        "changes nothing."
    )
    error = capsys.readouterr().err
    assert said in error
    said = (
        "What guesses tokens is the server's to choose: --spec-type, --model-draft changes nothing."
    )
    assert said in error
    assert run(["chat", "--server", url]) != 0
    assert "server's to choose" not in capsys.readouterr().err
