"""Parts that the replies of several endpoints have in common."""

from __future__ import annotations

import secrets
from typing import cast

from edgellm.llm import LLM
from edgellm.sequence import Piece, Progress, Sequence
from edgellm.server.reply_schemas import (
    ChatLogprobs,
    FinishReason,
    PromptProgress,
    Timings,
    TokenFacts,
    TokenLogprob,
    Usage,
)
from edgellm.tokenizer import Tokenizer

LEAST = -9999.0  # a log-probability: JSON has no -inf
_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "error": "error"}


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


def finish_reason(reason: str | None) -> FinishReason:
    """What was aborted has stopped."""
    return _FINISH.get(reason or "", "stop")


def usage(choices: list[Sequence]) -> Usage:
    """OpenAI's counts; a prompt counts once, all choices' tokens together."""
    first = choices[0]
    n_out = sum(len(choice.output) for choice in choices)
    return {
        "prompt_tokens": first.n_prompt,
        "completion_tokens": n_out,
        "total_tokens": first.n_prompt + n_out,
        "prompt_tokens_details": {"cached_tokens": first.n_cached},
    }


def timings(choice: Sequence) -> Timings:
    """llama.cpp's."""
    found = choice.timings()
    for kind in ("prompt", "predicted"):
        n = found[f"{kind}_n"]
        found[f"{kind}_per_token_ms"] = found[f"{kind}_ms"] / n if n else 0.0
    return cast(Timings, found)


def prompt_progress(progress: Progress) -> PromptProgress:
    """llama.cpp's: what ``processed`` counts includes what the cache had."""
    return {
        "total": progress.n_prompt,
        "cache": progress.n_cached,
        "processed": progress.n_read,
        "time_ms": round(1e3 * progress.seconds),
    }


def token_facts(tokenizer: Tokenizer, token: int, logprob: float) -> TokenFacts:
    """A token as chat logprobs show it."""
    raw = tokenizer.piece(token)
    return {
        "id": token,
        "token": raw.decode("utf-8", "replace") or tokenizer.token_text(token),
        "bytes": list(raw),
        "logprob": max(logprob, LEAST),
    }


def chat_logprobs(llm: LLM, pieces: list[Piece], n_top: int) -> ChatLogprobs:
    """Of the tokens that a chunk brings."""
    content: list[TokenLogprob] = []
    for piece in pieces:
        if piece.token is not None and piece.logprob is not None:
            facts = token_facts(llm.tokenizer, piece.token, piece.logprob)
            top = [token_facts(llm.tokenizer, t, p) for t, p in piece.top_logprobs[:n_top]]
            content.append({**facts, "top_logprobs": top})
    return {"content": content, "refusal": None}
