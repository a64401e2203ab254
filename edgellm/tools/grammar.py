"""Grammars for answers that have to be calls: `tool_choice` required, or a tool by its name.

What follows the grammar is read as calls by the parser of this folder. The text is for llguidance
(`SamplingParams.grammar`), in its dialect of Lark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgellm.errors import EdgeLLMError
from edgellm.thinking import ThinkingParser
from edgellm.tools.events import offered
from edgellm.tools.formats import Format
from edgellm.tools.python_bodies import QUOTE
from edgellm.tools.values import types_of

if TYPE_CHECKING:
    from edgellm.tokenizer import Tokenizer

JSON, PYTHON, GEMMA = "json", "python", "gemma"
# As structured output has it; a schema of a tool is a help for the model, so that keywords which
# the library does not know are passed over.
_GUIDANCE = {"lenient": True, "whitespace_pattern": r"( |\n{1,2}[ \t]{0,20})"}
_INDEX = "{n}"


class NoGrammar(EdgeLLMError):
    """Calls cannot be asked for in this way."""


@dataclass(frozen=True)
class Writing:
    """How a call is written: ``head`` with the name, the arguments, ``tail``; ``first`` and
    ``last`` around all calls, ``between`` two of them (None: there is but one). ``arguments`` is
    one of the styles above, or what opens and closes each of them."""

    head: str
    tail: str = ""
    arguments: str | tuple[str, str] = JSON
    first: str = ""
    last: str = ""
    between: str | None = ""


_XML = ("<parameter={key}>\n", "\n</parameter>\n")
_LIST = '[{"name": "{name}", "arguments": '
WRITINGS = {
    "hermes": Writing(
        '<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>", between="\n"
    ),
    "qwen-xml": Writing(
        "<tool_call>\n<function={name}>\n", "</function>\n</tool_call>", _XML, between="\n"
    ),
    "seed": Writing(
        "<seed:tool_call>\n<function={name}>\n", "</function>\n</seed:tool_call>", _XML,
        between="\n",
    ),
    "glm": Writing(
        "<tool_call>{name}\n", "</tool_call>",
        ("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"), between="\n",
    ),
    "llama-json": Writing('{"name": "{name}", "parameters": ', "}", between="; "),
    "harmony": Writing(
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", between=None
    ),
    "mistral": Writing("[TOOL_CALLS]{name}[ARGS]"),
    "mistral-v3": Writing(
        '{"name": "{name}", "arguments": ', "}", first="[TOOL_CALLS] [", last="]", between=", "
    ),
    "gemma4": Writing("<|tool_call>call:{name}", "<tool_call|>", GEMMA),
    "kimi": Writing(
        "<|tool_call_begin|>functions.{name}:{n}<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        first="<|tool_calls_section_begin|>", last="<|tool_calls_section_end|>",
    ),
    "kimi-k3": Writing(
        '<|open|>call tool="{name}" index="{n}"<|sep|>', "<|close|>call<|sep|>",
        ('<|open|>argument key="{key}" type="{type}"<|sep|>', "<|close|>argument<|sep|>"),
        "<|open|>tools<|sep|>", "<|close|>tools<|sep|>",
    ),
    "deepseek": Writing(
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
        first="<｜tool▁calls▁begin｜>", last="<｜tool▁calls▁end｜>",
    ),
    "deepseek-dsml": Writing(
        '<｜DSML｜invoke name="{name}">\n', "</｜DSML｜invoke>\n",
        ('<｜DSML｜parameter name="{key}" string="{is_string}">', "</｜DSML｜parameter>\n"),
        "<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>",
    ),
    "minimax": Writing(
        '<invoke name="{name}">\n', "</invoke>\n",
        ('<parameter name="{key}">', "</parameter>\n"),
        "<minimax:tool_call>\n", "</minimax:tool_call>",
    ),
    "cohere": Writing(
        '{"tool_call_id": "{n}", "tool_name": "{name}", "parameters": ', "}",
        first="<|START_ACTION|>[", last="]<|END_ACTION|>", between=", ",
    ),
    "lfm2": Writing(
        "{name}(", ")", PYTHON,
        first="<|tool_call_start|>[", last="]<|tool_call_end|>", between=", ",
    ),
    "pythonic": Writing("{name}(", ")", PYTHON, first="[", last="]", between=", "),
    "granite": Writing(_LIST, "}]", first="<|tool_call|>", between=None),
    "nemotron": Writing(_LIST, "}]", first="<TOOLCALL>", last="</TOOLCALL>", between=None),
    "apriel": Writing(_LIST, "}]", first="<tool_calls>", last="</tool_calls>", between=None),
    "functionary": Writing("<function={name}>", "</function>"),
}  # fmt: skip


def tool_grammar(
    format: Format,
    tools: Sequence[Mapping[str, Any]],
    name: str | None = None,
    *,
    parallel: bool = True,
    prompt: str = "",
    tokenizer: Tokenizer | None = None,
) -> str:
    """The grammar of an answer that calls one tool or, with ``parallel``, several.

    ``name``: this tool and no other. ``prompt``: its end; a thought that it begins is finished
    first. With a ``tokenizer`` the format's marks are its control tokens where it has them.
    """
    schemas = offered(tools)
    if name is not None:
        schemas = {one: schema for one, schema in schemas.items() if one == name}
    if not schemas:
        raise NoGrammar(
            "There is no tool to call." if name is None else f"There is no tool called {name!r}."
        )
    key = format.name
    if key == "mistral" and tokenizer is not None and not tokenizer.control_spans("[ARGS]"):
        key = "mistral-v3"
    if key not in WRITINGS:
        raise NoGrammar("This model's chat template knows no tools, so no call can be required.")
    return _Grammar(WRITINGS[key], tokenizer, format).text(schemas, parallel, prompt)


class _Grammar:
    def __init__(self, writing: Writing, tokenizer: Tokenizer | None, format: Format) -> None:
        self._w, self._tokenizer, self._format = writing, tokenizer, format
        self._rules: list[str] = []

    def text(self, schemas: Mapping[str, Mapping[str, Any]], parallel: bool, prompt: str) -> str:
        calls = [self._call(name, schema) for name, schema in schemas.items()]
        self._rules.append(f"call: {' | '.join(calls)}")
        w = self._w
        more = "" if not parallel or w.between is None else f"({self._literal(w.between)} call)*"
        parts = [self._thought(prompt), self._literal(w.first), "call", more, self._literal(w.last)]
        return "\n".join([f"start: {' '.join(filter(None, parts))}", *self._rules, ""])

    def _thought(self, prompt: str) -> str:
        if self._format.is_harmony:
            begin = self._literal("<|channel|>analysis<|message|>")
            end = self._literal("<|start|>assistant")
            return f"({begin} {self._until('<|end|>')} {end})?"
        closing = ThinkingParser(prompt).closing
        return "" if closing is None else f"{self._until(closing)} {self._literal(chr(10) * 2)}"

    def _call(self, name: str, schema: Mapping[str, Any]) -> str:
        head = self._literal(self._w.head.replace("{name}", name))
        arguments = " ".join(self._arguments(schema))
        return self._rule(f"{head} {arguments} {self._literal(self._w.tail)}")

    def _arguments(self, schema: Mapping[str, Any]) -> Iterator[str]:
        style = self._w.arguments
        if style == JSON:
            yield self._json({"type": "object", **schema})
            return
        properties: Mapping[str, Any] = schema.get("properties") or {}
        required = set(schema.get("required") or ())
        definitions = {k: schema[k] for k in ("$defs", "definitions") if k in schema}
        if isinstance(style, tuple):
            for key, one in properties.items():
                item = self._tagged(style, key, {**definitions, **one})
                yield item if key in required else f"({item})?"
            return
        items = []
        for key, one in properties.items():
            value = {**definitions, **one}
            if style == PYTHON:
                item = f"{self._literal(key + '=')} {self._json(value)}"
            else:
                item = f"{self._literal(key + ':')} {self._gemma(value)}"
            items.append((self._rule(item), key in required))
        listed = self._listed(items, ", " if style == PYTHON else ",")
        yield listed if style == PYTHON else f'"{{" {listed} "}}"'

    def _listed(self, items: Sequence[tuple[str, bool]], comma: str) -> str:
        """Some of the items in order, with commas between them: the rule for what stands behind
        an item is the rule of the next with its comma."""
        comma, after = self._literal(comma), ""
        alternatives: list[str] = []  # with this item as the first
        for item, is_required in reversed(items):
            alternatives = [f"{item} {after}"] + ([] if is_required else alternatives)
            tail = f"{comma} {item} {after}"
            after = self._rule(tail if is_required else f"{tail} | {after or chr(34) * 2}")
        is_empty = not any(required for _, required in items)
        return f"({' | '.join(alternatives)}){'?' if is_empty else ''}" if alternatives else ""

    def _tagged(self, tags: tuple[str, str], key: str, schema: Mapping[str, Any]) -> str:
        types = set(types_of(schema))
        is_string = types == {"string"} or not types
        kind = next(iter(types)) if len(types) == 1 else "string" if is_string else "object"
        opening = tags[0].replace("{key}", key).replace("{type}", kind)
        opening = self._literal(opening.replace("{is_string}", "true" if is_string else "false"))
        if not is_string:
            return f"{opening} {self._json(schema)} {self._literal(tags[1])}"
        choices = [c for c in schema.get("enum") or () if isinstance(c, str)]
        if choices:
            listed = " | ".join(map(self._literal, choices))
            return f"{opening} ({listed}) {self._literal(tags[1])}"
        return f"{opening} {self._until(tags[1])}"

    def _gemma(self, schema: Mapping[str, Any]) -> str:
        """Strings between Gemma's own marks; what is nested is held to the notation alone."""
        types, quote = set(types_of(schema)), self._literal(QUOTE)
        if types == {"string"}:
            choices = [c for c in schema.get("enum") or () if isinstance(c, str)]
            if choices:
                return f"{quote} ({' | '.join(map(self._literal, choices))}) {quote}"
            return f"{quote} {self._until(QUOTE)}"
        if types and not types & {"object", "array"}:
            return self._json(schema)
        if not any(rule.startswith("gemma:") for rule in self._rules):
            self._rules += [
                f"gemma: {quote} {self._until(QUOTE)} | /-?[0-9]{{1,9}}/ | \"true\" | \"null\" "
                '| "false" | "[" (gemma ("," gemma)*)? "]" | gemma_object',
                'gemma_object: "{" (gemma_pair ("," gemma_pair)*)? "}"',
                "gemma_pair: /[A-Za-z_]\\w*/ \":\" gemma",
            ]  # fmt: skip
        return "gemma_object" if types == {"object"} else "gemma"

    # ---- terms -------------------------------------------------------------------------------

    def _rule(self, body: str) -> str:
        self._rules.append(f"r{len(self._rules)}: {body}")
        return f"r{len(self._rules) - 1}"

    def _json(self, schema: Mapping[str, Any]) -> str:
        text = json.dumps({**schema, "x-guidance": _GUIDANCE})
        # llama.cpp's notation is told from Lark's by this text
        return self._rule("%json " + text.replace("::=", ":\\u003a="))

    def _until(self, mark: str) -> str:
        """Any text and the mark that ends it."""
        spans = [] if self._tokenizer is None else self._tokenizer.control_spans(mark)
        if spans and spans[0][0] == 0:
            return f"/(.|\\n)*/ {self._literal(mark)}"
        self._rules.append(f"r{len(self._rules)}[suffix={_quoted(mark)}]: /(.|\\n)*/")
        return f"r{len(self._rules) - 1}"

    def _literal(self, text: str) -> str:
        """A fixed text, its control tokens by their ids."""
        found, at = [], 0
        spans = [] if self._tokenizer is None else self._tokenizer.control_spans(text)
        for start, end in spans:
            found += [self._plain(text[at:start]), self._control(text[start:end])]
            at = end
        return " ".join(filter(None, [*found, self._plain(text[at:])]))

    def _control(self, text: str) -> str:
        assert self._tokenizer is not None
        return f"<[{self._tokenizer.encode(text, parse_special=True)[0]}]>"

    @staticmethod
    def _plain(text: str) -> str:
        parts = re.split(re.escape(_INDEX), text)
        return " /[0-9]{1,3}/ ".join(_quoted(part) if part else "" for part in parts)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
