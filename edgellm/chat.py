"""Messages to prompt text, by the chat template that the model file carries.

Templates were written for the transformers library's habits, not for the messages that clients
send, so messages are first brought into the shape this template can take
(`ChatTemplate.normalise`); what it can take is found by trying it, once and only when a message
needs to know.

A template comes from a file of unknown origin. One that is known by its checksum is rendered here;
any other in a helper process with limits on time and memory (template_helper.py).
"""

import copy
import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from edgellm import template_engine
from edgellm.errors import EdgeLLMError
from edgellm.template_engine import Fault
from edgellm.template_helper import HELPER, SECONDS, HelperLost
from edgellm.template_source import is_known

if TYPE_CHECKING:
    from edgellm.tokenizer import Tokenizer

Message = Mapping[str, Any]


class TemplateError(EdgeLLMError):
    """The chat template is at fault, or refuses these messages."""


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
    """One compiled template and what it can take.

    ``trusted``: render it in this process; None looks whether it is known. ``is_own``: it came
    with the model, so that it writes the BOS token where the model wants one.
    """

    def __init__(
        self,
        source: str,
        bos: str = "",
        eos: str = "",
        *,
        trusted: bool | None = None,
        is_own: bool = True,
    ) -> None:
        self.source, self._bos, self._eos, self.is_own = source, bos, eos, is_own
        self._deadline = self._spent = 0.0
        try:
            if len(source) <= template_engine.MAX_SOURCE and trusted is None:
                trusted = is_known(source)
            self._template: Any = None
            if trusted or len(source) > template_engine.MAX_SOURCE:
                self._template = template_engine.compile_source(source)
            else:
                start = time.monotonic()
                HELPER.render(source, None, datetime.now(), SECONDS)
                self._spent = min(time.monotonic() - start, SECONDS / 2)
        except Fault as fault:
            raise TemplateError(fault.text) from fault

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        now: datetime | None = None,
        variables: Mapping[str, Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt text. ``variables``: what the template may ask for, as enable_thinking."""
        if taken := RESERVED & set(variables or ()):
            raise TemplateError(f"A template variable may not be called {min(taken)}.")
        given = {**(variables or {}), "add_generation_prompt": add_generation_prompt}
        if documents is not None:
            given["documents"] = copy.deepcopy(list(documents))
        shaped = self.normalise(messages)
        if not tools:
            return self._run(shaped, None, now, **given)
        described = _with_descriptions(tools, parameters=False)
        try:
            return self._run(shaped, described, now, **given)
        except TemplateError as error:
            # A few templates need a description on every parameter; filling one in for all would
            # change the prompt of the templates that print only what is there.
            if not (isinstance(error.__cause__, Fault) and error.__cause__.undefined):
                raise
            more = _with_descriptions(tools, parameters=True)
            return self._run(shaped, more, now, **given)

    def _run(
        self,
        messages: Sequence[Message],
        tools: Any = None,
        now: datetime | None = None,
        /,  # a variable may be called like any of these
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
        }
        if tools is not None:
            context["tools"] = copy.deepcopy(tools)
        try:
            if self._template is not None:
                return template_engine.run(self._template, context, today)
            seconds = max(0.01, self._deadline - time.monotonic())
            return HELPER.render(self.source, context, today, seconds)
        except Fault as fault:
            raise TemplateError(fault.text) from fault

    def normalise(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages in the shape this template takes, nothing of them lost."""
        # for the probes and the render after them
        self._deadline, self._spent = time.monotonic() + SECONDS - self._spent, 0.0
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
        except TemplateError as error:
            if isinstance(error.__cause__, HelperLost):  # nothing was found out
                raise
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
