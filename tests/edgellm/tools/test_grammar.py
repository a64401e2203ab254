"""Answers that have to be calls are calls: what a random model writes in the grammar, our own
parser reads."""

import json
from dataclasses import replace

import pytest

from edgellm import LLM, SamplingParams
from edgellm.batch import as_completed
from edgellm.structured import compile_grammar
from edgellm.tools import BY_NAME, FORMATS, AnswerParser, CallArguments, CallStart, Content
from edgellm.tools.grammar import NoGrammar, tool_grammar

# No free texts: a random model would write one for ever.
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_it",
            "parameters": {
                "type": "object",
                "properties": {
                    "unit": {"type": "string", "enum": ["c", "f"]},
                    "days": {"type": "integer", "minimum": 0, "maximum": 99},
                    "wet": {"type": "boolean"},
                    "near": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2},
                },
                "required": ["days"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "now", "parameters": {"additionalProperties": False}},
    },
]
FREE = SamplingParams(max_tokens=600, temperature=1, top_k=0, top_p=1, min_p=0, seed=1)


@pytest.fixture(scope="module")
def llm(tiny_model):
    with LLM(tiny_model("llama", n_ctx=2048), n_threads=2) as model:
        yield model


def read(name, text, prompt=""):
    parser = AnswerParser(BY_NAME[name], TOOLS, prompt)
    events = [*parser.push(text), *parser.finish()]
    calls = [[e.name, ""] for e in events if isinstance(e, CallStart)]
    for event in events:
        if isinstance(event, CallArguments):
            calls[event.index][1] += event.text
    return "".join(e.text for e in events if isinstance(e, Content)), [
        (called, json.loads(arguments)) for called, arguments in calls
    ]


@pytest.mark.parametrize("name", [one.name for one in FORMATS])
def test_what_the_grammar_allows_is_read_as_calls(llm, name):
    # without control tokens in the tiny vocabulary all marks are text
    prompt = llm.tokenize("a")
    grammar = tool_grammar(BY_NAME[name], TOOLS, parallel=False)
    if name == "harmony":  # its optional thought would never end
        grammar = grammar.replace(grammar[grammar.index("(") : grammar.index(")?") + 2], "", 1)
    params = replace(FREE, grammar=grammar)
    compile_grammar(params)
    n = 0
    for _, found in as_completed(llm, [(prompt, replace(params, seed=s)) for s in range(12)]):
        assert not isinstance(found, Exception), found
        if found.finish_reason != "stop":
            continue
        n += 1
        content, calls = read(name, found.text)
        assert content == "" and len(calls) == 1, found.text
        called, arguments = calls[0]
        assert called == "now" or isinstance(arguments["days"], int), found.text
        assert arguments.get("wet") in (None, True, False)
    assert n >= 6


CITY = [
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
]
XML = "<function=get>\n<parameter=city>\na </p> b\n</parameter>\n</function>\n"


def accepts(llm, grammar, text):
    """Whether the text keeps to the grammar, and is a whole answer."""
    matcher = llm._prompts.grammars.matcher(replace(FREE, grammar=grammar))
    for token in llm.tokenize(text):
        if token not in matcher.allowed(llm.n_vocab):
            return False
        matcher.accept(token)
    return llm.tokenizer.eos in matcher.allowed(llm.n_vocab)


@pytest.mark.parametrize(
    "name, text",
    [
        ("hermes", '<tool_call>\n{"name": "get", "arguments": {"city": "</a>"}}\n</tool_call>'),
        ("qwen-xml", f"<tool_call>\n{XML}</tool_call>"),
        ("seed", f"<seed:tool_call>\n{XML}</seed:tool_call>"),
        (
            "glm",
            "<tool_call>get\n<arg_key>city</arg_key>\n<arg_value>a\nb</arg_value>\n</tool_call>",
        ),
        ("gemma4", '<|tool_call>call:get{city:<|"|>a "b"<|"|>,days:3}<tool_call|>'),
        ("gemma4", "<|tool_call>call:get{days:3}<tool_call|>"),
        ("gemma4", "<|tool_call>call:get{}<tool_call|>"),
        ("pythonic", '[get(city="a", days=3)]'),
        ("pythonic", "[get(days=3)]"),
        ("pythonic", "[get()]"),
        ("mistral", '[TOOL_CALLS]get[ARGS]{"days": 3}'),
    ],
)
def test_free_texts(llm, name, text):
    assert accepts(llm, tool_grammar(BY_NAME[name], CITY), text)
    parser = AnswerParser(BY_NAME[name], CITY)
    assert isinstance(next(parser.push(text)), CallStart)
    assert not accepts(llm, tool_grammar(BY_NAME[name], CITY), text.replace("get", "got"))


def test_several_calls_one_call_and_one_tool(llm):
    one = '{"name": "now", "parameters": {}}'
    form = BY_NAME["llama-json"]
    assert accepts(llm, tool_grammar(form, TOOLS), f"{one}; {one}")
    assert not accepts(llm, tool_grammar(form, TOOLS, parallel=False), f"{one}; {one}")
    assert accepts(llm, tool_grammar(form, TOOLS, "now"), one)
    assert not accepts(llm, tool_grammar(form, TOOLS, "get_it"), one)


def test_a_thought_is_finished_first(llm):
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    grammar = tool_grammar(BY_NAME["hermes"], TOOLS, "now", prompt="...<think>\n")
    assert accepts(llm, grammar, f"hm <b>\n</think>\n\n{call}")
    assert not accepts(llm, grammar, call)
    assert read("hermes", f"hm <b>\n</think>\n\n{call}", "<think>\n") == ("", [("now", {})])


def test_marks_are_control_tokens_where_the_model_has_them(llm):
    # <|start|> is one that prints, and so is text for a grammar too
    (end,) = llm.tokenizer.encode("<|end|>", parse_special=True)
    grammar = tool_grammar(BY_NAME["harmony"], TOOLS, "now", tokenizer=llm.tokenizer)
    assert f"<[{end}]>" in grammar and '"<|end|>"' not in grammar
    old = tool_grammar(BY_NAME["mistral"], TOOLS, "now", tokenizer=llm.tokenizer)
    assert accepts(llm, old, '[TOOL_CALLS] [{"name": "now", "arguments": {}}]')


def test_what_cannot_be_asked_for():
    with pytest.raises(NoGrammar, match="no tool called 'rm'"):
        tool_grammar(BY_NAME["hermes"], TOOLS, "rm")
    with pytest.raises(NoGrammar, match="no tool to call"):
        tool_grammar(BY_NAME["hermes"], [])
    with pytest.raises(NoGrammar, match="knows no tools"):
        tool_grammar(BY_NAME["plain"], TOOLS)
