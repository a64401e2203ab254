"""A conversation with a model: messages, their tokens, and what can be done with the last one.

No terminal here: `ask` yields the parts of the answer as they come. Closing it early keeps what
came. The token ids of the whole talk are kept too, so that the next turn continues with exactly the
tokens that the model has seen and written, not with those that its text would be cut into anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from edgellm.chat import ChatTemplate, special_texts
from edgellm.chat_tokens import encode_rendered, render_marked
from edgellm.errors import EdgeLLMError
from edgellm.template_source import choose
from edgellm.thinking import ANSWER, THINKING, Part
from edgellm.tools import AnswerParser, Content, Event, Reasoning, detect

if TYPE_CHECKING:
    from edgellm.llm import LLM
    from edgellm.sampling import SamplingParams


class ConversationError(EdgeLLMError):
    """What was asked of a conversation cannot be done."""


class ConversationFull(ConversationError):
    """The conversation does not fit into the context any more."""


class NoTemplate(ConversationError):
    """The model was not made for chatting."""


@dataclass(frozen=True)
class Seen:
    """Text and token ids that the model has gone through, an answer of its own at the end."""

    text: str
    tokens: list[int]


@dataclass
class Answer:
    """Facts about the latest answer. ``finish_reason`` None: it was stopped from outside."""

    n_prompt: int = 0
    n_thinking: int = 0  # tokens
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    context_full: bool = False
    timings: Mapping[str, float] = field(default_factory=dict)
    is_kept: bool = False  # it is in the conversation


def template_of(
    llm: LLM, asked: str | None = None, tools: bool = False, why_none: str | None = None
) -> ChatTemplate:
    """The chat template of a model, or the one ``asked`` for by name or file."""
    found = choose(metadata_of(llm), asked, tools)
    if found is None:
        raise NoTemplate(
            why_none
            or "This model has no chat template: it continues texts instead of answering. Use "
            "`edgellm run --raw`, or name a format it was trained for with --chat-template."
        )
    return ChatTemplate(found.text, *special_texts(llm.tokenizer), is_own=found.is_own)


def metadata_of(llm: LLM) -> Mapping[str, Any]:
    """The file's metadata with the template that the engine itself reports."""
    own = llm.chat_template
    return llm.metadata if own is None else {**llm.metadata, "tokenizer.chat_template": own}


class Conversation:
    """Messages to and from one model. ``variables`` go to the template, as enable_thinking."""

    def __init__(
        self,
        llm: LLM,
        template: ChatTemplate,
        system: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.llm, self.template, self.system = llm, template, system
        self.variables: dict[str, Any] = dict(variables or {})
        self.messages: list[dict[str, Any]] = []  # without the system message
        self.seen: Seen | None = None
        self._before: Seen | None = None  # the same before the last message
        self.last = Answer()
        self.on_prompt: Callable[[int], None] = lambda n_tokens: None  # before a prompt is read
        self._again = 0  # how often the last answer was asked for again

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

    @property
    def n_tokens(self) -> int:
        """Tokens of the context that the conversation takes so far."""
        if not self.messages and self.system is None:
            return 0
        if self.seen is not None:
            return len(self.seen.tokens)
        text, literal = self._rendered(add_generation_prompt=False)
        return len(encode_rendered(self.llm.tokenizer, self.template, text, literal))

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

    # ---- one turn ----------------------------------------------------------------------------

    def _rendered(self, **options: Any) -> tuple[str, list[tuple[int, int]]]:
        messages = list(self.messages)
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        return render_marked(
            self.llm.tokenizer, self.template, messages, variables=self.variables, **options
        )

    def _prompt(self) -> tuple[str, list[int]]:
        """Text and token ids of the next prompt."""
        tokenizer = self.llm.tokenizer
        text, literal = self._rendered()
        if self.seen is not None and text.startswith(self.seen.text):
            size = len(self.seen.text)
            later = [(start - size, end - size) for start, end in literal if start >= size]
            tail = tokenizer.encode_markup(text[size:], later)
            # Only behind a control token is the rest cut the same as within the whole.
            if tail and tokenizer.is_special(tail[0]):
                return text, self.seen.tokens + tail
        return text, encode_rendered(tokenizer, self.template, text, literal)

    def _answer(self, params: SamplingParams) -> Iterator[Part]:
        """One turn."""
        answer = self.last
        raw: list[str] = []
        parts: list[Part] = []
        prompt = ""
        stream: Any = None
        try:
            prompt, tokens = self._prompt()
            answer.n_prompt = len(tokens)
            self._check_room(len(tokens))
            form = detect(self.template.source)
            parser = AnswerParser(form, prompt=prompt[-200:], tokenizer=self.llm.tokenizer)
            self.on_prompt(len(tokens))
            stream = self.llm.stream(tokens, params)
            for piece in stream:
                raw.append(piece.text)
                for event in parser.push_token(piece.token, piece.text):
                    parts += _parts(event)
                    yield from _parts(event)
                if piece.token is not None:
                    answer.tokens.append(int(piece.token))
                    answer.n_thinking += parser.is_thinking
                answer.finish_reason = piece.finish_reason
            for event in parser.finish(complete=True):
                parts += _parts(event)
                yield from _parts(event)
            answer.context_full = self.llm.context_full
            answer.timings = self.llm.timings
        finally:
            if stream is not None:
                stream.close()
            if answer.tokens or answer.finish_reason is not None:
                self._keep(prompt, tokens, "".join(raw), parts)

    def _check_room(self, n_tokens: int) -> None:
        if n_tokens < self.llm.max_positions:
            return
        if len(self.messages) <= 1:
            raise ConversationFull(
                f"This message makes {n_tokens:,} tokens and the context has {self.llm.n_ctx:,}: "
                "shorten it, or start with a larger context (-c)."
            )
        raise ConversationFull(
            f"The conversation would have {n_tokens:,} tokens and the context has "
            f"{self.llm.n_ctx:,}: /clear starts a new one, /undo takes the last exchange back, and "
            "a larger context (-c) holds more."
        )

    def _keep(self, prompt: str, tokens: list[int], raw: str, parts: list[Part]) -> None:
        """Add the answer to the history."""
        content = "".join(part.text for part in parts if part.kind == ANSWER)
        thinking = "".join(part.text for part in parts if part.kind != ANSWER).strip()
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if thinking:
            # Templates that keep thinking in the history take it from here; others drop it.
            message["reasoning_content"] = thinking
        self.messages.append(message)
        decoder = self.llm.tokenizer.stream()
        written = "".join(decoder.push(token) for token in self.last.tokens)
        # A stop string is in the tokens but not in the text; half a character likewise.
        whole = written == raw
        self.last.is_kept = True
        self.seen = Seen(prompt + raw, tokens + self.last.tokens) if whole else None


def _parts(event: Event) -> list[Part]:
    """What a reader sees of it; without tools there are no calls."""
    if isinstance(event, Reasoning | Content):
        return [Part(THINKING if isinstance(event, Reasoning) else ANSWER, event.text)]
    return []
