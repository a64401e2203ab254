"""Thinking, text and calls told apart, in any cut of the text."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.tokenizer import BYTE_OF_LETTER, Tokenizer
from edgellm.tools import (
    BY_NAME,
    FORMATS,
    AnswerParser,
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Reasoning,
)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
PARIS = {"city": "Paris", "days": 3}
XML = "<function=get>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
INVOKE = (
    '<{0}invoke name="get">\n<{0}parameter name="city" string="true">Paris</{0}parameter>\n'
    '<{0}parameter name="days" string="false">3</{0}parameter>\n</{0}invoke>\n'
)
OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"
JSON = '{"city": "Paris", "days": 3}'
# How each format writes the call of PARIS.
CALLS = {
    "harmony": f"<|channel|>commentary to=functions.get <|constrain|>json<|message|>{JSON}",
    "kimi-k3": f'{OPEN}tools{SEP}{OPEN}call tool="get" index="1"{SEP}'
    f'{OPEN}argument key="city" type="string"{SEP}Paris{CLOSE}argument{SEP}'
    f'{OPEN}argument key="days" type="number"{SEP}3{CLOSE}argument{SEP}'
    f"{CLOSE}call{SEP}{CLOSE}tools{SEP}",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get:0"
    f"<|tool_call_argument_begin|>{JSON}<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek-dsml": f"<｜DSML｜tool_calls>\n{INVOKE.format('｜DSML｜')}</｜DSML｜tool_calls>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n"
    f"{JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "gemma4": '<|tool_call>call:get{city:<|"|>Paris<|"|>,days:3}<tool_call|>',
    "mistral": f"[TOOL_CALLS]get[ARGS]{JSON}",
    "glm": "<tool_call>get\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    "minimax": f"<minimax:tool_call>\n{INVOKE.format('')}</minimax:tool_call>",
    "seed": f"<seed:tool_call>\n{XML}</function>\n</seed:tool_call>",
    "qwen-xml": f"<tool_call>\n{XML}</function>\n</tool_call>",
    "cohere": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "get", "parameters": '
    f"{JSON}}}]<|END_ACTION|>",
    "lfm2": '<|tool_call_start|>[get(city="Paris", days=3)]<|tool_call_end|>',
    "granite": f'<|tool_call|>[{{"name": "get", "arguments": {JSON}}}]',
    "nemotron": f'<TOOLCALL>[{{"name": "get", "arguments": {JSON}}}]</TOOLCALL>',
    "apriel": f'<tool_calls>[{{"name": "get", "arguments": {JSON}}}]</tool_calls>',
    "functionary": f"<function=get>{JSON}</function>",
    "hermes": f'<tool_call>\n{{"name": "get", "arguments": {JSON}}}\n</tool_call>',
    "pythonic": "[get(city='Paris', days=3)]",
    "llama-json": f'{{"name": "get", "parameters": {JSON}}}',
}


def read(name, pieces, tools=TOOLS, prompt="", complete=False):
    """(reasoning, content, calls)"""
    parser = AnswerParser(BY_NAME[name], tools, prompt, seed=b"0")
    events = [event for piece in pieces for event in parser.push(piece)]
    events += parser.finish(complete)
    reasoning = "".join(e.text for e in events if isinstance(e, Reasoning))
    content = "".join(e.text for e in events if isinstance(e, Content))
    calls = [[e.id, e.name, ""] for e in events if isinstance(e, CallStart)]
    for event in events:
        if isinstance(event, CallArguments):
            calls[event.index][2] += event.text
    assert [e.index for e in events if isinstance(e, CallEnd)] == list(range(len(calls)))
    return reasoning, content, calls


def test_every_format_has_a_case():
    assert set(CALLS) == {one.name for one in FORMATS}


@pytest.mark.parametrize("name", CALLS)
def test_a_call(name):
    _, content, calls = read(name, [CALLS[name]])
    assert content == ""
    assert [(call, json.loads(arguments)) for _, call, arguments in calls] == [("get", PARIS)]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_text_and_two_calls(name, step):
    if name == "harmony":
        text = (
            "<|channel|>final<|message|>Look: <b> & [1] {2}<|end|><|start|>assistant"
            f"{CALLS[name]}<|call|><|start|>assistant{CALLS[name]}<|call|>"
        )
    else:
        text = f"Look: <b> & [1] {{2}}\n{CALLS[name]}\n{CALLS[name]}"
    _, content, calls = read(name, [text[n : n + step] for n in range(0, len(text), step)])
    assert content == "Look: <b> & [1] {2}"
    assert [json.loads(arguments) for _, _, arguments in calls] == [PARIS, PARIS]
    assert name == "kimi" or calls[0][0] != calls[1][0]  # the ids


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_cut_off_is_none(name):
    whole = CALLS[name]
    last = max(whole.rfind("Paris"), whole.rfind("3"))
    for size in range(last):
        _, content, calls = read(name, [whole[:size]])
        assert calls == []


@pytest.mark.parametrize("name", CALLS)
def test_without_tools_and_for_unknown_ones_there_are_no_calls(name):
    assert read(name, [CALLS[name]], tools=[])[2] == []
    assert read(name, [CALLS[name].replace("get", "got")])[2] == []


MARKS = sorted({mark for one in FORMATS for mark in one.marks} | {"<think>", "</think>"})
WORDS = st.sampled_from(
    [*CALLS.values(), *MARKS, "text", "\n", " ", '"', "{", "}", "[", "]", "get", "(", "\\", "'",
     "<|channel|>", "<|message|>", "<|end|>", "<|start|>assistant", "analysis", "<parameter=city>",
     "</parameter>", "<arg_value>", '{"name": "get", "arguments": {}}', "name=", "<", "|>"]
)  # fmt: skip


@settings(deadline=None)
@given(st.sampled_from(sorted(CALLS)), st.lists(WORDS, max_size=12), st.data())
def test_the_cut_does_not_matter_and_nothing_raises(name, words, data):
    text = "".join(words)
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    edges = [0, *places, len(text)]
    pieces = [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    whole = read(name, [text])
    assert read(name, pieces) == whole
    assert read(name, list(text)) == whole
    for _, called, arguments in whole[2]:
        assert called in ("get", "now") and isinstance(json.loads(arguments), dict)


@given(
    st.sampled_from(sorted(CALLS)), st.text(st.characters(exclude_characters="<[{"), max_size=40)
)
def test_plain_text_comes_as_it_is(name, text):
    if name != "harmony":
        assert read(name, [text])[:2] == ("", text)


@pytest.mark.parametrize(
    "name, text",
    [
        ("hermes", "<tool_call>not JSON</tool_call>"),
        ("hermes", '<tool_call>{"name": "get", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "rm", "arguments": {}}</tool_call> and on'),
        ("hermes", '<tool_call>{"name": "get", "arguments": {}}}</tool_call>'),
        ("qwen-xml", "Write <tool_call> to call."),
        ("qwen-xml", "Write <function=name> or <function=get_it."),
        ("qwen-xml", "<tool_call>\n<function=rm>\n</function>\n</tool_call>"),
        ("glm", "<tool_call>rm</tool_call>"),
        ("mistral", "[TOOL_CALLS] is a mark"),
        ("mistral", '[TOOL_CALLS]rm[ARGS]{"a": 1}'),
        ("llama-json", '{"name": "Ann", "age": 3} is JSON'),
        ("llama-json", '{"a": {"b": 1}} {'),
        ("pythonic", "[1, 2] and [link](there) and [get]"),
        ("gemma4", "<|tool_call>call:get{city<tool_call|>"),
        ("cohere", "<|START_ACTION|>later<|END_ACTION|>"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("step", [1, 1000])
def test_what_is_no_call_is_text(name, text, step):
    pieces = [text[n : n + step] for n in range(0, len(text), step)]
    assert read(name, pieces) == ("", text, [])


@pytest.mark.parametrize("name", ["hermes", "qwen-xml", "glm"])
def test_thinking_before_a_call(name):
    for prompt, begin in (("...<think>\n", ""), ("", "\n<think>")):
        reasoning, content, calls = read(
            name, list(f"{begin}\nhm <b>\n</think>\n\nSo.\n{CALLS[name]}"), prompt=prompt
        )
        assert (reasoning, content, len(calls)) == ("hm <b>", "So.", 1)


def test_a_missing_last_mark_counts_where_the_model_ended_by_itself():
    text = CALLS["hermes"].removesuffix("</tool_call>")
    assert read("hermes", [text])[2] == []
    assert len(read("hermes", [text], complete=True)[2]) == 1


@pytest.mark.parametrize("name", ["hermes", "qwen-xml", "glm"])
def test_a_call_at_the_end_of_a_thought_that_nobody_closed(name):
    text = f"hm\n{CALLS[name]}\n"
    reasoning, content, calls = read(name, [text], prompt="<think>", complete=True)
    assert reasoning.startswith("hm") and content == "" and len(calls) == 1
    assert read(name, [text], prompt="<think>")[2] == []  # cut off: who knows what would have come
    assert read(name, [text + "or not"], prompt="<think>", complete=True)[2] == []
    assert read(name, [text + "</think>no"], prompt="<think>", complete=True)[1:] == ("no", [])


def test_what_the_model_left_open_is_text_and_what_a_limit_cut_off_is_nothing():
    text = "Write <tool_call>{ and so on"
    assert read("hermes", [text], complete=True) == ("", text, [])
    assert read("hermes", [text]) == ("", "Write ", [])
    assert read("hermes", ["Well <tool_call>\n"], complete=True) == ("", "Well ", [])


def test_marks_in_strings_are_text():
    text = '<tool_call>{"name": "get", "arguments": {"city": "</tool_call>{"}}</tool_call>!'
    _, content, calls = read("hermes", list(text))
    assert json.loads(calls[0][2]) == {"city": "</tool_call>{"} and content == "!"


def test_arguments_stay_as_they_were_written():
    text = '<tool_call>{"arguments": {"days":1.0, "city":"\\u00e9"}, "name": "get"}</tool_call>'
    assert read("hermes", [text])[2][0][2] == '{"days":1.0, "city":"\\u00e9"}'
    text = '<tool_call>{"name": "get", "arguments": {"city": "a\nb", "city": "c\nd"}}</tool_call>'
    assert json.loads(read("hermes", [text])[2][0][2]) == {"city": "c\nd"}


def test_ids():
    assert read("kimi", [CALLS["kimi"]])[2][0][0] == "functions.get:0"
    own = read("hermes", [CALLS["hermes"]])[2][0][0]
    assert own.startswith("call_") and len(own) == 29
    assert len(read("mistral", [CALLS["mistral"]])[2][0][0]) == 9
    given = "[TOOL_CALLS]get[CALL_ID]abc123456[ARGS]{}"
    assert read("mistral", [given])[2][0][0] == "abc123456"
    ids = {next(AnswerParser(BY_NAME["mistral"], TOOLS).push(CALLS["mistral"])).id for _ in "ab"}
    assert len(ids) == 2


def test_an_answer_is_not_held_back():
    parser = AnswerParser(BY_NAME["hermes"], TOOLS)
    assert [e.text for e in parser.push("Hel")] == ["Hel"]
    assert [e.text for e in parser.push("lo <tool")] == ["lo "]
    assert [e.text for e in parser.push("bar>")] == ["<toolbar>"]
    assert [e.text for e in parser.push("<tool_call>no")] == ["<tool_call>", "no"]


def test_harmony_tells_messages_by_their_headers():
    text = (
        "<|channel|>analysis<|message|>I write <|call|> and <|end|> here.<|end|><|start|>assistant"
        "<|channel|>commentary<|message|>First.<|end|><|start|>assistant<|channel|>commentary "
        "to=python<|message|>1+1<|call|><|start|>assistant<|channel|>final<|message|> Then.<|end|>"
    )
    assert read("harmony", list(text)) == (
        "I write <|call|> and <|end|> here.", "First. Then.", []
    )  # fmt: skip
    assert read("harmony", ["No header."]) == ("", "No header.", [])


CONTROL = ("[TOOL_CALLS]", "[ARGS]", "<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from gguf import GGUFWriter

    path = tmp_path_factory.mktemp("vocabulary") / "bytes.gguf"
    writer = GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*BYTE_OF_LETTER, *CONTROL])
    writer.add_token_types([1] * 256 + [3] * len(CONTROL))
    writer.add_token_merges([])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return Tokenizer.from_gguf(path)


@pytest.mark.parametrize("name", ["mistral", "gemma4"])
def test_a_mark_is_the_token_and_not_its_letters(tokenizer, name):
    """A model that quotes a user's text does not call what is written there."""
    call = CALLS[name]
    city = call.index("Paris")
    tokens = tokenizer.encode(f"So: {call} ")
    tokens += tokenizer.encode(call[:city], parse_special=True)
    tokens += tokenizer.encode(CONTROL[0])
    tokens += tokenizer.encode(call[city + len("Paris") :], parse_special=True)
    parser = AnswerParser(BY_NAME[name], TOOLS, tokenizer=tokenizer)
    decoder = tokenizer.stream()
    events = [e for token in tokens for e in parser.push_token(token, decoder.push(token))]
    events += parser.finish()
    assert "".join(e.text for e in events if isinstance(e, Content)) == f"So: {CALLS[name]} "
    arguments = [json.loads(e.text) for e in events if isinstance(e, CallArguments)]
    assert arguments == [{"city": CONTROL[0], "days": 3}]


def test_thinking_by_control_tokens(tokenizer):
    parser = AnswerParser(BY_NAME["gemma4"], TOOLS, tokenizer=tokenizer)
    decoder = tokenizer.stream()
    text = "<|channel>thought\nhm<channel|>Yes."
    tokens = tokenizer.encode(text, parse_special=True)
    events = [e for token in tokens for e in parser.push_token(token, decoder.push(token))]
    assert "".join(e.text for e in events if isinstance(e, Reasoning)) == "hm"
    assert "".join(e.text for e in events if isinstance(e, Content)) == "Yes."
    plain = AnswerParser(BY_NAME["gemma4"], TOOLS, tokenizer=tokenizer)
    events = [*plain.push(text), *plain.finish()]
    assert "".join(e.text for e in events if isinstance(e, Content)) == text
