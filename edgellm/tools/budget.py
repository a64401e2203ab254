"""A limit on how many tokens a model may think.

When it is used up, the tokens of the mark that ends the thought are forced, one after the other, in
place of what the model would have drawn; then the model goes on by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgellm.errors import EdgeLLMError
from edgellm.tools.formats import detect
from edgellm.tools.parser import AnswerParser

if TYPE_CHECKING:
    from edgellm.sampling_params import SamplingParams
    from edgellm.tokenizer import Tokenizer
    from edgellm.tools.formats import Format

# A second thought of gpt-oss would follow the first for ever, so after it comes the answer.
_AFTER_HARMONY = ("<|start|>assistant", "<|start|>assistant<|channel|>final<|message|>")

_PROMPT_END = 32  # tokens in which a template may begin a thought


def budget_for(
    params: SamplingParams, template: str | None, tokenizer: Tokenizer, prompt: Sequence[int]
) -> ReasoningBudget | None:
    """The budget of a request; None: it has no limit."""
    if params.reasoning_budget < 0 or not tokenizer.has_text:
        return None
    end = tokenizer.decode(prompt[-_PROMPT_END:], special=True)
    return ReasoningBudget(params.reasoning_budget, detect(template or ""), tokenizer, end)


class ReasoningBudget:
    """Follows one answer (``accept``) and says what has to come next (``forced``).

    ``limit``: tokens of thinking in all; 0: none, -1: as many as the model likes. ``prompt``: its
    end, where a template may have begun the thought.
    """

    def __init__(self, limit: int, format: Format, tokenizer: Tokenizer, prompt: str = "") -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < -1:
            raise EdgeLLMError(
                f"reasoning_budget must be -1, 0 or a number of tokens, not {limit!r}."
            )
        self.limit, self.n_thinking = limit, 0
        self._tokenizer, self._is_harmony = tokenizer, format.is_harmony
        self._parser = AnswerParser(format, prompt=prompt, tokenizer=tokenizer)
        self._decoder = tokenizer.stream()
        self._coming: list[int] = []
        self._n_ended = 0

    def forced(self) -> int | None:
        """The token that has to come next; None: any may."""
        if not self._coming:
            closing = self._parser.closing
            if self.limit < 0 or closing is None or self.n_thinking < self.limit:
                return None
            if self._is_harmony:
                closing += _AFTER_HARMONY[min(self._n_ended, 1)]
            self._n_ended += 1
            self._coming = self._tokenizer.encode(closing, parse_special=True)
        return self._coming[0]

    def accept(self, token: int) -> None:
        """Take the token that was drawn or forced."""
        was_thinking = self._parser.is_thinking
        for _ in self._parser.push_token(token, self._decoder.push(token)):
            pass  # what it finds is not of interest, only where it stands
        if self._coming:
            # Another token can only come where a grammar or the engine would not have this one.
            self._coming = self._coming[1:] if token == self._coming[0] else []
        elif was_thinking and self._parser.is_thinking:
            self.n_thinking += 1
