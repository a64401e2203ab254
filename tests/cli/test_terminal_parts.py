"""Parts of the chat that need no process: the drawn region, message entry, sampling by name."""

import random

import pytest

from edgellm.cli._input import is_complete, message
from edgellm.cli._prompt_options import prestart_helper
from edgellm.cli._region import Region
from edgellm.cli._sampling import FLAGS, Sampling
from edgellm.cli._view import blocks
from edgellm.errors import EdgeLLMError
from edgellm.sampling import SamplingParams
from edgellm.template_helper import HELPER
from edgellm.template_source import choose

pyte = pytest.importorskip("pyte")


@pytest.mark.parametrize("seed", range(20))
def test_what_is_drawn_is_what_stands_there(seed):
    chance = random.Random(seed)
    screen = pyte.Screen(20, 200)
    screen.set_mode(pyte.modes.LNM)  # as a terminal line does: \n begins a line
    stream = pyte.Stream(screen)
    region, above = Region(stream.feed, 200), []
    for _ in range(6):
        lines: list[str] = []
        for _ in range(chance.randint(1, 8)):
            change = chance.randint(0, max(0, len(lines) - 1))
            lines = lines[:change] + [
                chance.choice("abc") * chance.randint(0, 19) for _ in range(chance.randint(1, 4))
            ]
            region.draw(lines)
            shown = [line.rstrip() for line in screen.display]
            assert shown[: len(above) + len(lines)] == above + lines
            assert not any(shown[len(above) + len(lines) :])
        if chance.random() < 0.3:
            region.erase()
        else:
            region.commit()
            above += lines


def test_nothing_is_written_when_nothing_changed():
    written: list[str] = []
    region = Region(written.append, 10)
    region.draw(["a", "b"])
    region.draw(["a", "b"])
    assert len(written) == 1
    region.draw(["a", "bc"])
    assert "a" not in written[1]


@pytest.mark.parametrize(
    "text, multiline, complete, sent",
    [
        ("Hi", False, True, "Hi"),
        ("Hi \\", False, False, None),
        ("Hi \\\nyou", False, True, "Hi \nyou"),
        ('"""', False, False, None),
        ('"""Hi', False, False, None),
        ('"""Hi"""', False, True, "Hi"),
        ('"""Hi\n\n  you\n"""', False, True, "Hi\n\n  you"),
        ('""""""', False, True, ""),
        ("Hi", True, False, None),
        ("Hi\n", True, True, "Hi"),
        ("/help", True, True, "/help"),
        ("", True, True, ""),
    ],
)
def test_when_a_message_is_complete(text, multiline, complete, sent):
    assert is_complete(text, multiline) is complete
    if complete:
        assert message(text) == sent


def test_blocks_of_markdown():
    for expected in (
        ["one\ntwo\n"],
        ["one\n\n", "two"],
        ["one\n\n", "```\ncode\n\nmore\n"],
        ["- a\n- b\n\n- c\n"],
        ["# a\n", "b\n\n", "| a |\n|---|\n\n", "> c\nd\n\n\n"],
        ["\n\n"],
        [""],
    ):
        assert blocks("".join(expected)) == expected


def sampling() -> Sampling:
    return Sampling({flag.field: flag.default for flag in FLAGS})


def test_defaults_are_those_of_the_engine():
    assert sampling().params() == SamplingParams(max_tokens=None, seed=-1)


@pytest.mark.parametrize(
    "name, text, field, value",
    [
        ("temperature", "0.2", "temperature", 0.2),
        ("--temp", "0", "temperature", 0.0),
        ("top-k", "5", "top_k", 5),
        ("num_predict", "-1", "max_tokens", None),
        ("stop", "END", "stop", ("END",)),
        ("stop", "", "stop", ()),
        ("ignore_eos", "on", "ignore_eos", True),
        ("ignore_eos", "off", "ignore_eos", False),
    ],
)
def test_parameters_by_name(name, text, field, value):
    chosen = sampling()
    chosen.set(name, text)
    assert getattr(chosen.params(), field) == value


@pytest.mark.parametrize(
    "name, text", [("nonsense", "1"), ("top_k", "many"), ("top_p", "7"), ("n", "0"), ("n", "-2")]
)
def test_what_is_refused_changes_nothing(name, text):
    chosen = sampling()
    before = chosen.as_dict()
    with pytest.raises(EdgeLLMError):
        chosen.set(name, text)
    assert chosen.as_dict() == before


@pytest.mark.parametrize(
    "template, asked, started",
    [
        ("{{ 1 }} unknown", None, True),
        (None, None, False),
        ("{{ 1 }} unknown", "chatml", False),
        (choose({}, "chatml").text, None, False),
    ],
)
def test_the_helper_is_started_ahead_only_for_an_unknown_template(
    tmp_path, monkeypatch, template, asked, started
):
    from gguf import GGUFWriter

    path = tmp_path / "m.gguf"
    writer = GGUFWriter(str(path), "llama")
    if template is not None:
        writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    calls = []
    monkeypatch.setattr(HELPER, "start", lambda: calls.append(1))
    prestart_helper(path, asked)
    assert bool(calls) is started
    prestart_helper(tmp_path / "absent.gguf", None)  # whoever opens it says so


def test_progress_that_goes_to_a_file_is_short(monkeypatch, capsys):
    from edgellm.cli import _output

    now = [100.0]
    monkeypatch.setattr(_output.time, "monotonic", lambda: now[0])
    status = _output.Status()
    for _ in range(20):
        status("loading")
        status.on_terminal("nothing of this")
        now[0] += 1
    assert capsys.readouterr().err == "loading\n" * 4
