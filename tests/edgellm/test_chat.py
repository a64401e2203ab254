"""Chat templates: the vectors, and what a hostile or broken template gives."""

import json
import os
from datetime import datetime
from pathlib import Path

import pytest

from edgellm.chat import ChatTemplate, TemplateError, render

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HI = [{"role": "user", "content": "Hi <b> & 'x'"}]


def chat_rows() -> list[dict]:
    root = os.environ.get("EDGELLM_VECTORS")
    if not root:
        return []
    path = Path(root) / "vectors" / "chat" / "chat.dev.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def rows_by_template() -> dict[str, list[dict]]:
    groups: dict[str, list[dict]] = {}
    for row in chat_rows():
        groups.setdefault(row["template"], []).append(row)
    return groups


ROWS = rows_by_template()


@pytest.mark.skipif(not ROWS, reason="EDGELLM_VECTORS is not set")
@pytest.mark.parametrize("name", sorted(ROWS) or [""])
def test_vectors(name):
    path = Path(os.environ["EDGELLM_VECTORS"]) / "vectors" / "chat" / "templates" / name
    source = path.read_text(encoding="utf-8")
    first, wrong = ROWS[name][0], []
    template = ChatTemplate(source, first["bos"], first["eos"])
    for row in ROWS[name]:
        prompt = template.render(
            row["messages"],
            add_generation_prompt=row["add_generation_prompt"],
            tools=row["tools"],
            now=datetime.fromisoformat(row["date"]),
            variables={"enable_thinking": True},
        )
        if prompt != row["prompt"]:
            wrong.append(row["case"])
    assert wrong == []


def test_chatml():
    expected = "<|im_start|>user\nHi <b> & 'x'<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, HI, "", "") == expected
    assert (
        render(CHATML, HI, "", "", add_generation_prompt=False)
        == expected[: -len("<|im_start|>assistant\n")]
    )


def test_functions_and_filters_of_transformers():
    source = (
        "{{ bos_token }}{{ strftime_now('%Y') }} {{ {'a': '<é>'} | tojson }} "
        "{{ '[1]' | from_json }} {{ '<' | safe ~ '&' }}{{ eos_token }}"
        "{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}"
        "{% generation %}g{% endgeneration %}"
    )
    text = ChatTemplate(source, "<s>", "</s>").render([], now=datetime(2026, 1, 2))
    assert text == '<s>2026 {"a": "<é>"} [1] <&</s>1g'


def test_messages_are_left_alone():
    messages = [{"role": "user", "content": None, "tool_calls": []}]
    render("{% for m in messages %}{{ m.tool_calls.append(1) }}{% endfor %}", messages, "", "")
    assert messages == [{"role": "user", "content": None, "tool_calls": []}]


def test_system_goes_into_the_first_user_turn_where_there_is_no_system_role():
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + CHATML
    messages = [{"role": "system", "content": "Be brief."}, *HI]
    assert "user\nBe brief.\nHi" in render(source, messages, "", "")


def test_parts_become_text_and_text_becomes_parts():
    parts = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
        }
    ]
    assert "user\none\ntwo<" in render(CHATML, parts, "", "")
    source = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    assert render(source, HI, "", "") == "[Hi <b> & 'x']"


@pytest.mark.parametrize(
    "source, says",
    [
        ("a\n{% if %}", "cannot be read, line 2"),
        ("a\nb\n{{ messages.x.y }}", "fails at line 3"),
        ("{{ raise_exception('roles must alternate') }}", "refuses .*roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "fails at line 1"),
        ("{{ 'x' * 10000000 }}", "repetition"),
        ("{{ 10 ** 100000 }}", "powers"),
        ("{% for i in range(10000000) %}{% endfor %}", "range"),
        ("{% for i in range(90) %}{{ 'x' * 999999 }}{% endfor %}", "more than 8,388,608"),
        ("x" * 300_000, "300,000 characters"),
    ],
)
def test_faults_are_typed_and_name_the_line(source, says):
    with pytest.raises(TemplateError, match=says) as caught:
        render(source, HI, "", "")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["self", "now", "context", "not a name", ""])
def test_a_variable_may_have_any_other_name(name):
    template = ChatTemplate("{{ now }}{{ messages[0].role }}")
    wanted = "5user" if name == "now" else "user"
    assert template.render(HI, variables={name: 5}) == wanted


def test_variables_reach_the_template_but_replace_nothing():
    template = ChatTemplate("{{ enable_thinking }}")
    assert template.render(HI, variables={"enable_thinking": False}) == "False"
    with pytest.raises(TemplateError, match="messages"):
        template.render(HI, variables={"messages": []})
