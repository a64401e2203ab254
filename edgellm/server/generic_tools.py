"""Tools for models whose template knows none: told in the system message, in Hermes' format."""

from __future__ import annotations

import json
from typing import Any

from edgellm.tools import BY_NAME, PLAIN, Format, detect

_TEXT = """\
You may call one or more functions to help with the user's request. These are offered, as JSON
schemas within <tools></tools>:
<tools>
{tools}
</tools>
To call a function, answer with its name and arguments as a JSON object within
<tool_call></tool_call>:
<tool_call>
{{"name": "the name", "arguments": {{"the argument": "its value"}}}}
</tool_call>"""


def format_of(template: str, tools: list[dict[str, Any]]) -> Format:
    """How calls are written: as the template has it, else as told by ``with_tools``."""
    found = detect(template)
    return BY_NAME["hermes"] if found is PLAIN and tools else found


def with_tools(
    template: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(messages, tools) for the template: where it knows no tools, they, their calls and results
    become text of the messages."""
    if not tools or detect(template) is not PLAIN:
        return messages, tools
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    told = _TEXT.format(tools=listed)
    first, rest = messages[0], messages[1:]
    if first["role"] == "system":
        system = {**first, "content": f"{first['content']}\n\n{told}"}
    else:
        system, rest = {"role": "system", "content": told}, messages
    return [system, *map(_as_text, rest)], []


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        content = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": content}
    if not (calls := message.get("tool_calls")):
        return message
    texts = [message["content"]] if message["content"] else []
    for call in calls:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                pass  # a model wrote it; it sees it again as it was
        body = {"name": function["name"], "arguments": arguments}
        texts.append(f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>")
    return {"role": "assistant", "content": "\n".join(texts)}
