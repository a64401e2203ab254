"""A rendered chat as token ids, in which only the template can write control tokens.

A user who types "<|im_end|>" must not end his turn with it. So texts of control tokens in messages
are marked before the template sees them, found again in what it writes, and encoded as plain text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgellm.chat import ChatTemplate, Message
    from edgellm.tokenizer import Tokenizer

# Marks of a model's thinking are markup also where they stand in an earlier answer: templates look
# for them there.
THINKING_TEXTS = frozenset(
    "<think> </think> [THINK] [/THINK] <|START_THINKING|> <|END_THINKING|> <seed:think> "
    "</seed:think> <mm:think> </mm:think> <thinking> </thinking> <reasoning> </reasoning>".split()
)
KEPT_KEYS = frozenset(("role", "type"))  # templates compare these


def render_tokens(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    **options: Any,
) -> list[int]:
    """The prompt's token ids; ``options`` are those of `ChatTemplate.render`.

    Where no message holds the text of a control token, the ids are those of the rendered text.
    """
    return encode_rendered(tokenizer, template, *render_marked(tokenizer, template, messages,
                                                               **options))  # fmt: skip


def render_marked(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Message], **options: Any
) -> tuple[str, list[tuple[int, int]]]:
    """(rendered text, spans of it that are to stay text)."""
    given = {"messages": list(messages)}
    given |= {key: options[key] for key in ("tools", "documents") if options.get(key)}
    if not any(tokenizer.control_spans(text) for text in _texts(given)):
        return template.render(messages, **options), []
    marker = _Marker(tokenizer, json.dumps(given, ensure_ascii=False, default=str))
    marked = marker.mark(given)
    options |= {key: marked[key] for key in ("tools", "documents") if key in marked}
    return marker.find(template.render(marked["messages"], **options))


def encode_rendered(
    tokenizer: Tokenizer, template: ChatTemplate, text: str, literal: Sequence[tuple[int, int]]
) -> list[int]:
    """Token ids of a rendered chat; the template has written the special tokens, the first one
    included, unless it is not the model's own."""
    ids = tokenizer.encode_markup(text, literal)
    if not template.is_own and tokenizer.add_bos and tokenizer.bos is not None:
        if ids[:1] != [tokenizer.bos]:
            ids.insert(0, tokenizer.bos)
    return ids


def _texts(value: Any) -> Iterator[str]:
    """All texts in it but those that are not content."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            if key not in KEPT_KEYS:
                yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


class _Marker:
    """Puts two characters that occur nowhere else into every text of a control token: behind its
    first character and before its last. Inside, because templates trim what they are given."""

    def __init__(self, tokenizer: Tokenizer, everything: str) -> None:
        self._tokenizer = tokenizer
        free = (chr(code) for code in range(0x10FFFD, 0x100000, -1))
        unused = (letter for letter in free if letter not in everything)
        self._open, self._close = next(unused), next(unused)

    def mark(self, value: Any, role: str = "") -> Any:
        """A copy with the marks in it."""
        if isinstance(value, str):
            return self._mark_text(value, role)
        if isinstance(value, Mapping):
            role = str(value.get("role") or role)
            return {
                self._mark_text(str(key), role): inner
                if key in KEPT_KEYS
                else self.mark(inner, role)
                for key, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.mark(inner, role) for inner in value]
        return value

    def _mark_text(self, text: str, role: str) -> str:
        pieces, done = [], 0
        for start, end in self._tokenizer.control_spans(text):
            if role == "assistant" and text[start:end].strip() in THINKING_TEXTS:
                continue
            inner = text[start + 1 : max(start + 1, end - 1)]
            last = text[max(start + 1, end - 1) : end]
            pieces += [text[done : start + 1], self._open, inner, self._close, last]
            done = end
        return "".join(pieces) + text[done:]

    def find(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        """The text without the marks, and the spans that they enclosed."""
        for mark in (self._open, self._close):  # templates may print lists, and JSON in ASCII
            text = text.replace(json.dumps(mark)[1:-1], mark).replace(repr(mark)[1:-1], mark)
        pieces: list[str] = []
        spans: list[tuple[int, int]] = []
        length, opened = 0, 0
        for character in _cut(text, self._open + self._close):
            if character == self._open:
                opened = length
            elif character == self._close:
                spans.append((max(0, opened - 1), length + 1))
            else:
                pieces.append(character)
                length += len(character)
        return "".join(pieces), spans


def _cut(text: str, marks: str) -> Iterator[str]:
    """Stretches without marks, and the marks, in order."""
    start = 0
    for place, character in enumerate(text):
        if character in marks:
            yield text[start:place]
            yield character
            start = place + 1
    yield text[start:]
