"""Templates of unknown origin: what they can do to the process that renders them, and to ours."""

import json
import os
import subprocess
import sys
import threading
import time
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from edgellm import template_helper
from edgellm.chat import ChatTemplate, TemplateError
from edgellm.template_engine import Fault
from edgellm.template_helper import HELPER
from edgellm.template_source import _known, built_in, checksum, choose, is_known

HI = [{"role": "user", "content": "Hi"}]
HOSTILE = {
    "nested loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "loops that multiply": "{% for a in range(9999) %}{% for b in range(9999) %}{{ a * b }}"
    "{% endfor %}{% endfor %}",
    "string multiply": "{{ 'x' * 10000000000 }}",
    "repeated doubling": "{% set s = namespace(v='xxxxxxxx') %}{% for i in range(60) %}"
    "{% set s.v = s.v ~ s.v %}{% endfor %}",
    "list doubling": "{% set s = namespace(v=[1, 2, 3]) %}{% for i in range(60) %}"
    "{% set s.v = s.v + s.v %}{% endfor %}",
    "append for ever": "{% set l = [] %}{% for a in range(90000) %}{% for b in range(90000) %}"
    "{% set _ = l.append('x' * 1000) %}{% endfor %}{% endfor %}",
    "a loop over what it grows": "{% set l = [0] %}{% for a in l %}{% set _ = l.append(a) %}"
    "{% endfor %}",
    "huge range": "{{ range(10000000000) | list }}",
    "range in join": "{% for i in range(999) %}{{ range(99999) | join('xxxxxxxxxx') }}{% endfor %}",
    "recursive macro": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "macros that fan out": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for x in [[]] recursive %}{{ loop([[]]) }}{% endfor %}",
    "huge power": "{{ 9 ** 9 ** 9 }}",
    "huge product": "{% set s = namespace(v=9999999999) %}{% for i in range(60) %}"
    "{% set s.v = s.v * s.v %}{% endfor %}",
    "wide format": "{{ '%999999999d' % 1 }}",
    "wide format method": "{{ '{:999999999}'.format(1) }}",
    "format by filter": "{{ '%999999999d' | format(1) }}",
    "ljust": "{{ 'x'.ljust(999999999) }}",
    "center": "{{ 'x' | center(999999999) }}",
    "indent": "{{ ('x\n' * 1000) | indent(99999999) }}",
    "replace that grows": "{% set s = namespace(v='aaaaaaaaaa') %}{% for i in range(30) %}"
    "{% set s.v = s.v | replace('a', 'aaaaaaaaaa') %}{% endfor %}",
    "lipsum": "{{ lipsum(n=99999999) }}",
    "zeros": "{{ 'x'.zfill(4000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(2000000000) }}",
    "json that nests": "{% set s = namespace(v=[]) %}{% for i in range(90000) %}"
    "{% set s.v = [s.v] %}{% endfor %}{{ s.v | tojson }}",
    "a list in itself": "{% set l = [] %}{% set _ = l.append(l) %}{{ l | tojson }}",
    "parentheses": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "nested blocks": "{% if 1 %}" * 5_000 + "{% endif %}" * 5_000,
    "bytes": "{{ (0).to_bytes(4000000000) }}",
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "class by attr": "{{ '' | attr('__class__') }}",
    "globals of a macro": "{{ raise_exception.__globals__ }}",
    "class by format": "{{ '{0.__class__}'.format('') }}{{ cycler.__init__.__globals__.os }}",
    "self": "{{ self.__init__.__globals__ }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os.system('true') }}",
    "slow word search": "{{ ('a' * 100000 + '!') | wordwrap(1) | wordcount }}" * 100,
    "sorting": "{% for i in range(9999) %}{{ (range(99999) | list | sort(reverse=true))[0] }}"
    "{% endfor %}",
    "much output": "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
}


@pytest.fixture(autouse=True)
def warm():
    HELPER.start()
    assert HELPER.render("{{ 1 }}", {}, datetime.now(), 5.0) == "1"


def resident(pid: int) -> int:
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_soon_and_small(name):
    helper, ours = HELPER._process.pid, resident(os.getpid())
    resting, most, done = resident(helper), 0, threading.Event()

    def watch():
        nonlocal most
        while not done.wait(0.002):
            most = max(most, resident(helper) - resting)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start, used = time.perf_counter(), psutil.Process(helper).cpu_times().user
    try:
        # Some are stopped by a limit, some by the sandbox; a few do nothing that matters.
        text = ChatTemplate(HOSTILE[name]).render(HI)
        assert len(text) < 9 << 20
        assert "root:" not in text and "module 'os'" not in text and "<class" not in text
    except TemplateError as error:
        assert "\n" not in str(error) and len(str(error)) < 700
    finally:
        seconds = time.perf_counter() - start
        done.set()
        watcher.join()
    assert seconds < template_helper.STARVED + 0.3, used
    assert most < 64 << 20
    assert resident(os.getpid()) - ours < 64 << 20


def test_a_lost_helper_is_replaced_and_what_was_asked_may_be_asked_again():
    template = ChatTemplate("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
                            "{% endfor %}")  # fmt: skip
    with pytest.raises(TemplateError, match="takes too long"):
        template.render(HI)
    with pytest.raises(TemplateError, match="takes too long"):
        template.render(HI)
    fits = ChatTemplate("{{ messages[0].content }}{{ '' }}")
    with pytest.raises(TemplateError, match="memory|too long"):
        fits.render([{"role": "user", "content": "é" * 5_000_000}])
    assert fits.render(HI) == "Hi"
    assert ChatTemplate("{{ messages[0].content }}").render(HI) == "Hi"  # the next one is served


def test_the_helper_is_reused_and_replaced():
    pid = HELPER._process.pid
    assert ChatTemplate("{{ 1 }} ").render(HI) == "1 "
    assert HELPER._process.pid == pid
    HELPER._process.kill()
    HELPER._process.wait()
    assert ChatTemplate("{{ 2 }} ").render(HI) == "2 "
    assert HELPER._process.pid != pid


def test_the_helper_imports_no_engine_and_holds_no_secret(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    HELPER.stop()
    HELPER.start()
    HELPER.render("{{ 1 }}", {}, datetime.now(), 5.0)
    code = (
        "import sys, edgellm.template_worker; "
        "heavy = {'numpy', 'numba', 'llvmlite', 'tokenizers', 'psutil'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    environment = Path(f"/proc/{HELPER._process.pid}/environ")
    if environment.exists():
        assert b"secret" not in environment.read_bytes()


def test_the_helper_ends_with_its_parent():
    code = (
        "from edgellm.chat import ChatTemplate; from edgellm.template_helper import HELPER; "
        "ChatTemplate('{{ 1 }} ').render([]); print(HELPER._process.pid)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    pid = int(done.stdout)
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie":
            break
        time.sleep(0.05)
    else:
        pytest.fail("it is still there")


def test_messages_that_are_no_data_are_refused_in_words():
    with pytest.raises(TemplateError, match="cannot be handed"):
        ChatTemplate("{{ x }} ").render(HI, variables={"x": object()})


def test_the_same_text_from_the_helper_as_from_here():
    root = os.environ.get("EDGELLM_VECTORS")
    if not root:
        pytest.skip("EDGELLM_VECTORS is not set")
    folder = Path(root) / "vectors" / "chat"
    rows = [json.loads(line) for line in (folder / "chat.dev.jsonl").read_text().splitlines()]
    templates: dict[str, ChatTemplate] = {}
    for row in rows[::5]:
        name = row["template"]
        if name not in templates:
            source = (folder / "templates" / name).read_text(encoding="utf-8")
            templates[name] = ChatTemplate(source, row["bos"], row["eos"], trusted=False)
        prompt = templates[name].render(
            row["messages"],
            add_generation_prompt=row["add_generation_prompt"],
            tools=row["tools"],
            now=datetime.fromisoformat(row["date"]),
            variables={"enable_thinking": True},
        )
        assert prompt == row["prompt"], (name, row["case"])


def test_ours_are_known_and_work():
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "One."},
        {"role": "user", "content": "Two?"},
    ]
    for name in built_in():
        source = choose({}, name)
        assert is_known(source.text), f"{name} is missing in known.txt: {checksum(source.text)}"
        text = ChatTemplate(source.text, "<s>", "</s>").render(talk)
        places = [text.find(part) for part in ("Be brief.", "One?", "One.", "Two?")]
        assert -1 not in places
        assert places[1:] == sorted(places[1:])
        assert text.startswith("<s>") is ("bos_token" in source.text), name
    assert all(len(line) == 64 for line in _known())


def test_where_a_template_comes_from(tmp_path):
    metadata = {
        "tokenizer.chat_template": "own",
        "tokenizer.chat_template.tool_use": "tools",
        "tokenizer.chat_template.rag": b"rag",
    }
    assert choose(metadata).text == "own"
    assert choose(metadata, tools=True).text == "tools"
    assert choose(metadata, "rag").text == "rag" and choose(metadata, "rag").is_own
    assert choose(metadata, "default").text == "own"
    assert choose({}) is None
    chatml = choose(metadata, "chatml")
    assert "<|im_start|>" in chatml.text and not chatml.is_own
    (tmp_path / "x.jinja").write_text("mine")
    assert choose(metadata, str(tmp_path / "x.jinja")).text == "mine"
    with pytest.raises(ValueError, match="one of rag, tool_use|one of tool_use, rag, chatml"):
        choose(metadata, "nonsense")
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        choose(metadata, "absent.jinja")
    (tmp_path / "latin.jinja").write_bytes(b"\xe9")
    with pytest.raises(ValueError, match="UTF-8"):
        choose(metadata, str(tmp_path / "latin.jinja"))


def test_a_helper_that_cannot_start_is_said(monkeypatch):
    HELPER.stop()
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(Fault, match="cannot be started"):
        HELPER.render("{{ 1 }}", {}, datetime.now(), 1.0)
