"""A conversation with a loaded model.

The token ids of the whole talk are kept beside its messages, so that the next turn continues with
exactly the tokens that the model has seen and written, not with those that its text would be cut
into anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from edgellm.chat import ChatTemplate, special_texts
from edgellm.chat_tokens import encode_rendered, render_marked
from edgellm.talk import ConversationError, Seen, Talk
from edgellm.template_source import choose
from edgellm.thinking import ANSWER, THINKING, Part
from edgellm.tools import AnswerParser, Content, Event, Reasoning, detect

if TYPE_CHECKING:
    from edgellm.llm import LLM
    from edgellm.sampling_params import SamplingParams


class ConversationFull(ConversationError):
    """The conversation does not fit into the context any more."""


class NoTemplate(ConversationError):
    """The model was not made for chatting."""


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


class Conversation(Talk):
    """With one model in this process, through ``template``."""

    def __init__(
        self,
        llm: LLM,
        template: ChatTemplate,
        system: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(system, variables)
        self.llm, self.template = llm, template

    @property
    def n_tokens(self) -> int:
        if not self.messages and self.system is None:
            return 0
        if self.seen is not None:
            return len(self.seen.tokens)
        text, literal = self._rendered(add_generation_prompt=False)
        return len(encode_rendered(self.llm.tokenizer, self.template, text, literal))

    # ---- one turn ----------------------------------------------------------------------------

    def _rendered(self, **options: Any) -> tuple[str, list[tuple[int, int]]]:
        return render_marked(
            self.llm.tokenizer, self.template, self._with_system(), variables=self.variables,
            **options,
        )  # fmt: skip

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
                    answer.n_answer += 1
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
                self._keep(parts, self._seen(prompt, tokens, "".join(raw)))

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

    def _seen(self, prompt: str, tokens: list[int], raw: str) -> Seen | None:
        """What the model has gone through, where its tokens are the text."""
        decoder = self.llm.tokenizer.stream()
        written = "".join(decoder.push(token) for token in self.last.tokens)
        # A stop string is in the tokens but not in the text; half a character likewise.
        return Seen(prompt + raw, tokens + self.last.tokens) if written == raw else None


def _parts(event: Event) -> list[Part]:
    """What a reader sees of it; without tools there are no calls."""
    if isinstance(event, Reasoning | Content):
        return [Part(THINKING if isinstance(event, Reasoning) else ANSWER, event.text)]
    return []
