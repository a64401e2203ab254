"""From what a caller asks to sequences that can be queued."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from edgellm.errors import EdgeLLMError
from edgellm.request_options import RequestOptions
from edgellm.sampling import Sampler, SamplingParams, UserSampler, resolve_bias
from edgellm.sequence import Sequence
from edgellm.structured import Grammars
from edgellm.tokenizer import Tokenizer
from edgellm.tools.budget import budget_for

Prompt = str | list[int]


class ContextFull(EdgeLLMError):
    """A prompt of ``n_prompt`` tokens does not fit into the context of ``n_ctx``."""

    def __init__(self, message: str, n_prompt: int, n_ctx: int) -> None:
        super().__init__(message)
        self.n_prompt, self.n_ctx = n_prompt, n_ctx


@dataclass(frozen=True)
class Prompts:
    """What requests for one model are made with. ``block`` of a model with recurrent layers is the
    number of tokens after which a state may be kept; None: it has no such layers."""

    tokenizer: Callable[[], Tokenizer]
    n_vocab: int
    max_positions: int
    users: List[UserSampler]
    chat_template: str | None
    block: int | None

    @cached_property
    def grammars(self) -> Grammars:
        """Compiled once for each text."""
        return Grammars(self.tokenizer(), self.n_vocab)

    def sequences(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions | None, n: int
    ) -> list[Sequence]:
        """The n choices of a request; the first has the others as its forks. EdgeLLMError for what
        cannot be served."""
        if not isinstance(params, SamplingParams):
            raise EdgeLLMError(f"params must be SamplingParams, not {type(params).__name__}.")
        options = options if options is not None else RequestOptions()
        if not isinstance(options, RequestOptions):
            raise EdgeLLMError(f"options must be RequestOptions, not {type(options).__name__}.")
        check_positive(n=n)
        tokenizer, tokens = self.tokenizer(), self._tokens(prompt)
        seed, marks = params.resolved_seed(), self._marks(tokens, n)
        bias = resolve_bias(params, tokenizer, self.n_vocab)
        choices = []
        for choice in range(n):
            sequence = Sequence(
                list(tokens), params, tokenizer.stream(), options, choice, seed, marks
            )
            sequence.sampler = Sampler(
                params,
                seed,
                bias=bias,
                users=self.users,
                matcher=self.grammars.matcher(params) if params.structured else None,
                budget=budget_for(params, self.chat_template, tokenizer, tokens),
                piece=tokenizer.piece if tokenizer.has_text else None,
                choice=choice,
            )
            choices.append(sequence)
        choices[0].forks = choices[1:]
        return choices

    def _tokens(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            tokens = self.tokenizer().encode(prompt, add_special=True, parse_special=False)
        elif is_tokens(prompt):
            tokens = [int(t) for t in prompt]
        else:
            raise EdgeLLMError("A prompt is a text or a list of token ids.")
        if not tokens:
            raise EdgeLLMError("The prompt is empty: it needs at least one token.")
        if bad := [t for t in tokens if not 0 <= t < self.n_vocab]:
            raise EdgeLLMError(
                f"Token id {bad[0]} is not in the vocabulary of {self.n_vocab} tokens."
            )
        if len(tokens) > self.max_positions:
            raise ContextFull(
                f"The prompt has {len(tokens)} tokens and the context {self.max_positions}: "
                "shorten it or ask for a larger context (-c).",
                len(tokens), self.max_positions,
            )  # fmt: skip
        return tokens

    def _marks(self, tokens: list[int], n: int) -> frozenset[int]:
        """Where the state of recurrent layers is kept: behind the first message and the last two
        (their ends are the tokens that end a text), else before what a template may put behind
        them."""
        if self.block is None:
            return frozenset()
        eog, last = self.tokenizer().eog, len(tokens) - 1
        ends = [i + 1 for i, token in enumerate(tokens) if token in eog and i < last]
        before = max(0, last - self.block) // self.block * self.block
        marks = {*ends[:1], *ends[-2:]} or {before}
        if n > 1:
            marks.add(last)  # the other choices go on from there
        return frozenset(marks - {0})


def is_tokens(prompt: Any) -> bool:
    """Whether a prompt is given as token ids."""
    return isinstance(prompt, list | tuple | np.ndarray) and all(
        isinstance(t, int | np.integer) and not isinstance(t, bool) for t in prompt
    )


def check_positive(**values: int | None) -> None:
    """EdgeLLMError names the first that is neither None nor a whole number of at least 1."""
    for name, value in values.items():
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if value is not None and (not whole or value < 1):
            raise EdgeLLMError(f"{name} must be a whole number of at least 1, not {value!r}.")
