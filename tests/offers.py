"""A tool that tests of the server offer, and a chat template that knows how tools are called."""

from __future__ import annotations

from typing import Any

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
HERMES = (
    "{% if tools %}<tools>{{ tools }}</tools> <tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>{% endif %}'
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}<|assistant|>"
)
