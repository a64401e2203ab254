"""What the prefix cache had of a request's prompt: for the log, and for clients that ask.

The log has numbers and the place in the messages, never what anybody wrote; the client gets the
words on both sides as well (they are its own, or those of others with its key and salt).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request as HttpRequest

from edgellm.llm import LLM
from edgellm.request import Remark, Request
from edgellm.sequence import Sequence
from edgellm.server.reply_schemas import CacheReport
from edgellm.server.service import Service

ARRIVED = "edgellm.arrived"  # when the head of a request was there, in its scope
_STAGES = ("prepare_ms", "queue_ms", "prefill_ms", "decode_ms", "send_ms")


@dataclass(frozen=True)
class Rendered:
    """A chat as the template wrote it: the text, its tokens, and role and content of the messages
    that it was made from."""

    text: str
    tokens: list[int]
    messages: list[tuple[str, str]]

    def message_at(self, place: int) -> int:
        """The message that the character at ``place`` belongs to, with the markup before it."""
        end = 0
        for i, (_, content) in enumerate(self.messages):
            content = content.strip()  # templates trim what they are given
            if (found := self.text.find(content, end)) >= 0:
                end = found + len(content)
            if place < end:
                return i
        return len(self.messages) - 1

    def message_of_token(self, llm: LLM, n: int) -> int:
        """The message that the token behind the first ``n`` belongs to."""
        if 2 * n > len(self.tokens):  # whichever is less to decode
            rest = llm.tokenizer.decode(self.tokens[n:], special=True)
            return self.message_at(len(self.text) - len(rest))
        return self.message_at(len(llm.tokenizer.decode(self.tokens[:n], special=True)))


def _message(llm: LLM, sequence: Sequence, chat: Rendered | None) -> tuple[int, str] | None:
    """(number, role) of the message in which a prompt departs from the nearest earlier one."""
    report = llm.cache_report(sequence)
    if chat is None or report is None or not 0 < report.n_common < report.n_prompt:
        return None
    number = chat.message_of_token(llm, report.n_common)
    return number, chat.messages[number][0]


def cache_report(llm: LLM, sequence: Sequence, chat: Rendered | None = None) -> CacheReport:
    """The field of replies."""
    report, message = llm.cache_report(sequence), _message(llm, sequence, chat)
    return {
        "prompt_tokens": sequence.n_prompt,
        "cached_tokens": sequence.n_cached,
        "common_tokens": 0 if report is None else report.n_common,
        "message": None if message is None else message[0],
        "role": None if message is None else message[1],
        "explanation": llm.explain(sequence),
    }


def remark(
    service: Service, http: HttpRequest, request: Request, chat: Rendered | None = None
) -> Callable[[], Remark]:
    """A function that says what became of a request, and where its time went."""

    def said() -> Remark:
        return Remark(line(), {"model": service.model, **_facts(http, request)})

    def line() -> str:
        path, llm = http.url.path, service.engine.llm
        sequence, report = request.choices[0], llm.cache_report(request.choices[0])
        seconds = (sequence.finished or time.perf_counter()) - sequence.arrived
        reason = sequence.finish_reason or "abort"  # which the engine may not have seen yet
        n_out = sum(len(choice.output) for choice in request.choices)
        line = f"{path}: {reason}, {n_out} tokens in {seconds:.2f} s"
        if report is None:
            return f"{line}; it was not begun"
        line += f"; {sequence.n_cached} of {sequence.n_prompt} prompt tokens were cached"
        if not report.n_common:
            return f"{line}: no earlier request begins like it"
        if report.n_common >= report.n_prompt:
            return f"{line}: an earlier request has them all"
        line += f": it departs from an earlier one at token {report.n_common}"
        message = _message(llm, sequence, chat)
        return line if message is None else f"{line}, in message {message[0]} ({message[1]})"

    return said


def _facts(http: HttpRequest, request: Request) -> dict[str, object]:
    """For programs. The stages follow each other without gaps, from the head of the request to
    now: template and tokens, queue, prompt, answer, and what was left to send."""
    first, now = request.choices[0], time.perf_counter()
    arrived = http.scope[ARRIVED]
    places = [arrived, first.arrived, first.started, first.first_token, first.finished, now]
    stages, before = {}, arrived
    for name, place in zip(_STAGES, places[1:], strict=True):
        place = place or before  # it was never reached
        stages[name] = round(1e3 * (place - before), 3)
        before = place
    return {
        "path": http.url.path, "finish_reason": first.finish_reason,
        "prompt_tokens": first.n_prompt, "cached_tokens": first.n_cached,
        "completion_tokens": sum(len(choice.output) for choice in request.choices),
        "total_ms": round(1e3 * (now - arrived), 3), **stages,
    }  # fmt: skip
