"""Messages to prompt text, by the chat template that the model file carries.

Templates are Jinja2 as the transformers library runs it: the same options, filters and functions.
They were written for that library's habits, not for the messages that clients send, so messages are
first brought into the shape this template can take (`ChatTemplate.normalise`); what it can take is
found by trying it, once and only when a message needs to know.

A template comes from a file of unknown origin. It runs in Jinja2's sandbox on a copy of the
messages, with caps on its own length, on repetition and on what it writes. The sandbox has no clock
of its own: a template that loops without output is stopped by nothing here.
"""

import copy
import json
import traceback
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment

from edgellm.errors import EdgeLLMError

if TYPE_CHECKING:
    from edgellm.tokenizer import Tokenizer

Message = Mapping[str, Any]

MAX_SOURCE = 256 * 1024  # characters of a template; the longest known one has 40,000
MAX_REPEAT = 1_000_000  # elements of a repeated string or list
MAX_PROMPT = 64 << 20  # characters


class TemplateError(EdgeLLMError):
    """The chat template is at fault, or refuses these messages."""


class _Generation(jinja2.ext.Extension):
    """The tag pair {% generation %}, which marks the model's turns for training: no effect here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(SandboxedEnvironment):
    """Jinja2's sandbox with a limit on what one operator may allocate.

    Not the immutable one: some templates call `.append` on lists. They work on a copy.
    """

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if operator == "**":
            raise SecurityError("powers are not allowed")
        for sequence, count in ((left, right), (right, left)):
            if isinstance(sequence, str | list | tuple) and isinstance(count, int):
                if len(sequence) * count > MAX_REPEAT:
                    raise SecurityError(f"a repetition of more than {MAX_REPEAT:,} elements")
        return super().call_binop(context, operator, left, right)


class _Refusal(Exception):
    """What a template raises by raise_exception."""


def _raise_exception(message: object) -> None:
    raise _Refusal(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja2's own filter escapes for HTML. Generators become lists."""

    def plain(other: Any) -> Any:
        return list(other) if isinstance(other, Iterable) else str(other)

    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=plain,
    )


def _environment() -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.filters["from_json"] = json.loads
    # The stock filter makes Markup, which then HTML-escapes whatever is joined to it.
    environment.filters["safe"] = lambda value: value
    environment.globals["raise_exception"] = _raise_exception
    return environment


ENVIRONMENT = _environment()

# Names that belong to the renderer: a caller's variables may not replace them.
RESERVED = frozenset(
    ("messages", "tools", "bos_token", "eos_token", "add_generation_prompt", "strftime_now")
)

# What the probes send: words that no template contains by itself.
_ASK: Message = {"role": "user", "content": "QUERY77"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "FN77",
        "description": "DESC77",
        "parameters": {
            "type": "object",
            "properties": {"ARG77": {"type": "string", "description": "d"}},
            "required": ["ARG77"],
        },
    },
}


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


class ChatTemplate:
    """One compiled template and what it can take."""

    def __init__(self, source: str, bos: str = "", eos: str = "") -> None:
        if len(source) > MAX_SOURCE:
            raise TemplateError(
                f"The chat template has {len(source):,} characters; {MAX_SOURCE:,} are allowed."
            )
        self.source, self._bos, self._eos = source, bos, eos
        with _errors_named():
            self._template = ENVIRONMENT.from_string(source)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        now: datetime | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. ``variables``: what the template may ask for, as enable_thinking."""
        if taken := RESERVED & set(variables or ()):
            raise TemplateError(f"A template variable may not be called {min(taken)}.")
        given = {"now": now, **(variables or {}), "add_generation_prompt": add_generation_prompt}
        shaped = self.normalise(messages)
        if not tools:
            return self._run(shaped, None, **given)
        described = _with_descriptions(tools, parameters=False)
        try:
            return self._run(shaped, described, **given)
        except TemplateError as error:
            # A few templates need a description on every parameter; filling one in for all would
            # change the prompt of the templates that print only what is there.
            if not isinstance(error.__cause__, jinja2.UndefinedError):
                raise
            return self._run(shaped, _with_descriptions(tools, parameters=True), **given)

    def _run(
        self,
        messages: Sequence[Message],
        tools: Any = None,
        now: datetime | None = None,
        **variables: Any,
    ) -> str:
        """Render as it is."""
        today = now or datetime.now()
        context = {
            "add_generation_prompt": True,
            "date_string": today.strftime("%d %b %Y"),
            "datetime": today.strftime("%b %d %Y"),
            **variables,
            "messages": copy.deepcopy(list(messages)),
            "bos_token": self._bos,
            "eos_token": self._eos,
            "strftime_now": today.strftime,
        }
        if tools is not None:
            context["tools"] = copy.deepcopy(tools)
        pieces: list[str] = []
        written = 0
        with _errors_named():
            for piece in self._template.generate(context):
                written += len(piece)
                if written > MAX_PROMPT:
                    raise SecurityError(f"it writes more than {MAX_PROMPT:,} characters")
                pieces.append(piece)
        return "".join(pieces)

    def normalise(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages in the shape this template takes, nothing of them lost."""
        shaped = [dict(copy.deepcopy(message)) for message in messages]
        for message in shaped:
            # "developer" is OpenAI's newer name of "system"; gpt-oss templates know it.
            if message.get("role") == "developer" and "<|channel|>" not in self.source:
                message["role"] = "system"
            message["content"] = self._shape_content(message.get("content"))
            for call in message.get("tool_calls") or ():
                function = call["function"]
                function["arguments"] = self._shape_arguments(function.get("arguments"))
        if shaped and shaped[0]["role"] == "system" and not self._takes_system:
            self._move_system_into_user(shaped)
        return shaped

    def _shape_content(self, content: Any) -> Any:
        if content is None:
            return ""
        if isinstance(content, str) and not self._takes_text:
            return _parts(content)
        if isinstance(content, list) and not self._takes_parts:
            return "\n".join(part.get("text", "") for part in content if part["type"] == "text")
        return content

    def _shape_arguments(self, arguments: Any) -> Any:
        """Clients send JSON text; most templates want the object."""
        if isinstance(arguments, str) and self._takes_object_arguments:
            try:
                return json.loads(arguments or "{}")
            except ValueError:
                return arguments
        if isinstance(arguments, dict) and not self._takes_object_arguments:
            if self._takes_text_arguments:
                return json.dumps(arguments, ensure_ascii=False)
        return arguments

    @staticmethod
    def _move_system_into_user(messages: list[dict[str, Any]]) -> None:
        system = messages.pop(0)["content"]
        for message in messages:
            if message["role"] == "user":
                if isinstance(message["content"], str) and isinstance(system, str):
                    message["content"] = f"{system}\n{message['content']}"
                else:
                    both = (system, message["content"])
                    lists = [_parts(part) if isinstance(part, str) else part for part in both]
                    message["content"] = lists[0] + lists[1]
                return

    # What the template takes, each found by one trial render when first asked for.

    def _try(self, messages: Sequence[Message], tools: Any = None) -> str:
        try:
            return self._run(messages, tools)
        except TemplateError:
            return ""

    @cached_property
    def _takes_text(self) -> bool:
        return "QUERY77" in self._try([_ASK])

    @cached_property
    def _takes_parts(self) -> bool:
        """Content as a list of parts; some print the list itself, which does not count."""
        text = self._try([{"role": "user", "content": _parts("QUERY77")}])
        return "QUERY77" in text and "'type'" not in text and '"type"' not in text

    def _content(self, text: str) -> Any:
        return text if self._takes_text else _parts(text)

    @cached_property
    def _takes_system(self) -> bool:
        system = {"role": "system", "content": self._content("SYS77")}
        return "SYS77" in self._try([system, {**_ASK, "content": self._content("QUERY77")}])

    def _try_call(self, arguments: Any) -> str:
        ask = {**_ASK, "content": self._content("QUERY77")}
        function = {"name": "FN77", "arguments": arguments}
        call = {"id": "call00001", "type": "function", "function": function}
        return self._try(
            [
                ask,
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call00001", "name": "FN77", "content": "RES77"},
                {"role": "assistant", "content": "done"},
                ask,
            ],
            [_TOOL],
        )

    @cached_property
    def _takes_object_arguments(self) -> bool:
        text = self._try_call({"ARG77": "VAL77"})
        return "VAL77" in text and "FN77" in text and "{'ARG77'" not in text

    @cached_property
    def _takes_text_arguments(self) -> bool:
        text = self._try_call('{"ARG77": "VAL77"}')
        return "VAL77" in text and '\\"ARG77\\"' not in text


def render(
    template: str,
    messages: Sequence[Message],
    bos: str,
    eos: str,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    now: datetime | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render once. Keep a `ChatTemplate` to render often."""
    chat = ChatTemplate(template, bos, eos)
    return chat.render(messages, add_generation_prompt, tools, now, variables)


def special_texts(tokenizer: "Tokenizer") -> tuple[str, str]:
    """(BOS, EOS) as a template prints them; empty where the model has none."""

    def text(token: int | None) -> str:
        return "" if token is None else tokenizer.token_text(token)

    return text(tokenizer.bos), text(tokenizer.eos)


def _with_descriptions(tools: Sequence[Mapping[str, Any]], parameters: bool) -> list[Any]:
    """A copy in which every function, and on demand every parameter, has a description."""
    filled = copy.deepcopy(list(tools))
    for tool in filled:
        function = tool.get("function")
        if not isinstance(function, dict):
            continue
        function.setdefault("description", "")
        if parameters:
            for value in ((function.get("parameters") or {}).get("properties") or {}).values():
                if isinstance(value, dict):
                    value.setdefault("description", "")
    return filled


class _errors_named:
    """Turns whatever a template raises into a TemplateError that names the template's line."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or not isinstance(error, Exception):
            return
        if isinstance(error, jinja2.TemplateSyntaxError):
            text = f"The chat template cannot be read, line {error.lineno}: {error.message}."
        elif isinstance(error, _Refusal):
            text = f"The chat template refuses these messages: {error}"
        else:
            # Jinja2 rewrites tracebacks so that frames of a template carry its own lines.
            frames = [f for f in traceback.extract_tb(trace) if f.filename == "<template>"]
            line = f" at line {frames[-1].lineno}" if frames else ""
            text = f"The chat template fails{line}: {str(error) or type(error).__name__}."
        raise TemplateError(text) from error
