"""Whether two models mean the same by a token id."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgellm.errors import EdgeLLMError

_TOKENS, _MODEL = "tokenizer.ggml.tokens", "tokenizer.ggml.model"


class VocabularyMismatch(EdgeLLMError):
    """A draft model's tokens are not the target's."""


def check_vocabularies(
    target: Mapping[str, Any], draft: Mapping[str, Any], n_target: int, n_draft: int
) -> None:
    """The ids that both models have must have the same text; how many unused ones a vocabulary ends
    with does not matter. ``target`` and ``draft`` are the files' metadata. VocabularyMismatch."""
    kinds = str(target.get(_MODEL)), str(draft.get(_MODEL))
    if kinds[0] != kinds[1]:
        raise VocabularyMismatch(
            f"The draft model (-md) has a vocabulary of the kind {kinds[1]} and the target one of "
            f"the kind {kinds[0]}: take a smaller model of the target's family."
        )
    ours, theirs = target.get(_TOKENS), draft.get(_TOKENS)
    if ours is None or theirs is None:
        if n_target != n_draft:
            raise VocabularyMismatch(
                f"The draft model (-md) has {n_draft:,} tokens and the target {n_target:,}: take a "
                "smaller model of the target's family."
            )
        return
    for token, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            raise VocabularyMismatch(
                f"Token {token} is {_text(mine)!r} in the target and {_text(other)!r} in the draft "
                "model (-md): take a smaller model of the target's family."
            )
    longer = max((ours, theirs), key=len)
    n_both = min(len(ours), len(theirs))
    if more := [text for text in map(_text, longer[n_both:]) if not _is_filler(text)]:
        whose = "target" if longer is ours else "draft model (-md)"
        others = f" and {len(more) - 1:,} others" if len(more) > 1 else ""
        raise VocabularyMismatch(
            f"Only the {whose} has the token {more[0]!r}{others}: take a smaller model of the "
            "target's family."
        )


def _text(token: bytes | str) -> str:
    return token.decode("utf-8", "replace") if isinstance(token, bytes) else token


def _is_filler(text: str) -> bool:
    """A token that stands for nothing, as files have them up to a round number."""
    lower = text.lower()
    return any(word in lower for word in ("pad", "unused", "reserved", "dummy", "extra"))
