"""A talk with a model, wherever it runs: messages, and what can be done with the last one.

No terminal here: `ask` yields the parts of the answer as they come. Closing it early keeps what
came.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from edgellm.errors import EdgeLLMError
from edgellm.sampling_params import SamplingParams
from edgellm.thinking import ANSWER, Part


class ConversationError(EdgeLLMError):
    """What was asked of a conversation cannot be done."""


@dataclass(frozen=True)
class Seen:
    """Text and token ids that the model has gone through, an answer of its own at the end."""

    text: str
    tokens: list[int]


@dataclass
class Answer:
    """Facts about the latest answer. ``finish_reason`` None: it was stopped from outside."""

    n_prompt: int = 0
    n_answer: int = 0  # tokens, of which
    n_thinking: int = 0
    tokens: list[int] = field(default_factory=list)  # where they are known
    finish_reason: str | None = None
    context_full: bool = False
    timings: Mapping[str, float] = field(default_factory=dict)
    is_kept: bool = False  # it is in the conversation


class Talk(ABC):
    """Messages to and from one model. ``variables`` go to its template, as enable_thinking. The
    token ids of the whole talk are in ``seen``, where they are known."""

    def __init__(
        self, system: str | None = None, variables: Mapping[str, Any] | None = None
    ) -> None:
        self.system = system
        self.variables: dict[str, Any] = dict(variables or {})
        self.messages: list[dict[str, Any]] = []  # without the system message
        self.seen: Seen | None = None
        self._before: Seen | None = None  # the same before the last message
        self.last = Answer()
        self.on_prompt: Callable[[int], None] = lambda n_tokens: None  # before a prompt is read
        self._again = 0  # how often the last answer was asked for again

    @abstractmethod
    def _answer(self, params: SamplingParams) -> Iterator[Part]:
        """One turn: fills ``last`` and keeps the answer when anything came."""

    @property
    @abstractmethod
    def n_tokens(self) -> int:
        """Tokens of the context that the conversation takes so far."""

    # ---- asking ------------------------------------------------------------------------------

    def ask(self, text: str, params: SamplingParams) -> Iterator[Part]:
        """The answer to a new message. When nothing comes, by an error or an early stop, the
        conversation is as it was before; so it is with the two below."""
        with self._undone_unless_answered():
            self._again, self._before = 0, self.seen
            self.messages.append({"role": "user", "content": text})
            yield from self._answer(params)

    def regenerate(self, params: SamplingParams) -> Iterator[Part]:
        """Another answer to the last message; with a seed given, the seeds after it are used."""
        with self._undone_unless_answered():
            self._drop_answer()
            self._again += 1
            if params.seed is not None and params.seed >= 0:
                params = replace(params, seed=(params.seed + self._again) % (1 << 32))
            yield from self._answer(params)

    def edit(self, text: str, params: SamplingParams) -> Iterator[Part]:
        """Put ``text`` in the place of the last message and answer it."""
        with self._undone_unless_answered():
            self._drop_answer()
            self._again = 0
            self.messages[-1] = {"role": "user", "content": text}
            yield from self._answer(params)

    def undo(self) -> str:
        """Take back the last message and its answer; the message's text."""
        self._drop_answer()
        self._again, self._before = 0, None
        return str(self.messages.pop()["content"])

    def clear(self) -> None:
        """Forget all messages; the system message stays."""
        self.messages, self.seen, self._before, self._again = [], None, None, 0

    def _drop_answer(self) -> None:
        """Cut off what stands behind the last message of the user."""
        if not any(message["role"] == "user" for message in self.messages):
            raise ConversationError("There is no message yet.")
        while self.messages[-1]["role"] != "user":
            self.messages.pop()
        self.seen = self._before

    @contextmanager
    def _undone_unless_answered(self) -> Iterator[None]:
        before = list(self.messages), self.seen, self._before, self._again
        self.last = Answer()
        try:
            yield
        finally:
            if not self.last.is_kept:
                self.messages, self.seen, self._before, self._again = before

    # ---- state -------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything needed to go on later, as plain data."""
        seen = self.seen and {"text": self.seen.text, "tokens": self.seen.tokens}
        return {"system": self.system, "messages": list(self.messages), "seen": seen}

    def restore(self, state: Mapping[str, Any], same_model: bool = True) -> None:
        """Take up a state; its token ids only when it comes from the same model."""
        self.system = state["system"]
        self.messages = [dict(message) for message in state["messages"]]
        seen, self._before, self._again = state.get("seen"), None, 0
        self.seen = Seen(seen["text"], list(seen["tokens"])) if seen and same_model else None

    def _with_system(self) -> list[dict[str, Any]]:
        """The messages as a model is to see them."""
        messages = list(self.messages)
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        return messages

    def _keep(self, parts: list[Part], seen: Seen | None) -> None:
        """Add the answer to the history."""
        content = "".join(part.text for part in parts if part.kind == ANSWER)
        thinking = "".join(part.text for part in parts if part.kind != ANSWER).strip()
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if thinking:
            # Templates that keep thinking in the history take it from here; others drop it.
            message["reasoning_content"] = thinking
        self.messages.append(message)
        self.last.is_kept, self.seen = True, seen
