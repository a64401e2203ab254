"""/v1/completions: texts or token ids to go on with, and what the model thinks of a text (echo)."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from edgellm.llm import LLM
from edgellm.request import Request
from edgellm.sampling_params import SamplingParams
from edgellm.sequence import Piece, Score, Sequence
from edgellm.server import sse
from edgellm.server.body import read
from edgellm.server.errors import ApiError, unsupported
from edgellm.server.explained import cache_report, remark
from edgellm.server.infill import fim_prompt
from edgellm.server.models import serving
from edgellm.server.parameters import capped, check_n, request_options, sampling_params
from edgellm.server.replies import LEAST, finish_reason, new_id, prompt_progress, timings
from edgellm.server.reply_schemas import (
    CacheReported,
    CompletionChunk,
    CompletionReply,
    FinishReason,
    LegacyLogprobs,
    TextChoice,
    Usage,
)
from edgellm.server.schemas import CompletionRequest
from edgellm.server.service import Service, aborted_on_disconnect, give_up, in_thread, until_left

_MOST_PROMPTS = 256
_DEFAULT_TOKENS = 16  # OpenAI's


def prompts_of(body: CompletionRequest, llm: LLM, allow_special: bool) -> list[list[int]]:
    """Token ids of every prompt; with ``allow_special`` texts of control tokens are those."""
    given: Any = body.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not given:
        raise ApiError(400, "prompt: at least one is needed.", param="prompt")
    if len(given) > _MOST_PROMPTS:
        raise ApiError(400, f"prompt: at most {_MOST_PROMPTS} at once.", param="prompt")
    found = []
    for i, prompt in enumerate(given):
        if not isinstance(prompt, str) and any(token >= llm.n_vocab for token in prompt):
            raise ApiError(
                400, f"prompt.{i}: the vocabulary has {llm.n_vocab} tokens.", param="prompt"
            )
        if body.suffix is not None:
            tokens = fim_prompt(llm, prompt, body.suffix, "suffix")
        else:
            is_text = isinstance(prompt, str)
            tokens = llm.tokenize(prompt, True, allow_special) if is_text else list(prompt)
        if not tokens:
            raise ApiError(400, f"prompt.{i}: it is empty.", param="prompt")
        found.append(tokens)
    return found


class _Legacy:
    """The arrays of OpenAI's first completions: tokens, their logprobs, offsets in the text."""

    def __init__(self, llm: LLM, n_top: int) -> None:
        self._llm, self._n_top = llm, n_top
        # what a token adds to the text is not always what is written for it alone
        self._decoder, self._offset = llm.tokenizer.stream(), 0

    def arrays(self, scored: list[Score]) -> LegacyLogprobs:
        offsets = []
        for token, _, _ in scored:
            offsets.append(self._offset)
            self._offset += len(self._decoder.push(token))
        return {
            "tokens": [self._text(token) for token, _, _ in scored],
            "token_logprobs": [None if p is None else max(p, LEAST) for _, p, _ in scored],
            "top_logprobs": [None if p is None else self._top(best) for _, p, best in scored],
            "text_offset": offsets,
        }

    def _top(self, best: list[tuple[int, float]]) -> dict[str, float]:
        """By text; of tokens that are written alike, the likeliest counts."""
        found: dict[str, float] = {}
        for token, logprob in best[: self._n_top]:
            found.setdefault(self._text(token), max(logprob, LEAST))
        return found

    def _text(self, token: int) -> str:
        return self._llm.tokenizer.piece(token, special=True).decode("utf-8", "replace")


def _scored(pieces: list[Piece], sequence: Sequence) -> list[Score]:
    """Of the tokens of a choice's pieces, and behind the last one of the token that ended it."""
    found: list[Score] = [
        (p.token, p.logprob, list(p.top_logprobs)) for p in pieces if p.token is not None
    ]
    if sequence.end is not None and any(p.finish_reason is not None for p in pieces):
        found.append(sequence.end)
    return found


class _Answer:
    """One completion request, of one or several prompts."""

    def __init__(
        self, service: Service, body: CompletionRequest, prompts: list[list[int]],
        requests: list[Request],
    ) -> None:  # fmt: skip
        self._llm, self._body, self._prompts = service.engine.llm, body, prompts
        self._requests = requests
        self._id, self._created, self._model = new_id("cmpl-"), int(time.time()), service.model

    def _echo(self, i: int) -> str:
        return self._llm.detokenize(self._prompts[i]) if self._body.echo else ""

    async def whole(self) -> CompletionReply:
        choices: list[TextChoice] = []
        for i in range(len(self._prompts)):
            if not self._requests:
                choices.append(self._choice(len(choices), self._echo(i), [], "length"))
                continue
            request = self._requests[i]
            pieces: list[list[Piece]] = [[] for _ in request.choices]
            while (piece := await request.next()) is not None:
                pieces[piece.choice].append(piece)
            for sequence, mine in zip(request.choices, pieces, strict=True):
                text = self._echo(i) + "".join(piece.text for piece in mine)
                reason = finish_reason(sequence.finish_reason)
                scored = [*request.choices[0].scores, *_scored(mine, sequence)]
                choices.append(self._choice(len(choices), text, scored, reason))
        found: CompletionReply = {
            "id": self._id, "object": "text_completion", "created": self._created,
            "model": self._model, "choices": choices, "usage": self._usage(),
        }  # fmt: skip
        if self._requests:
            found["timings"] = timings(self._requests[0].choices[0])
            self._add_cache_report(found)
        return found

    def _choice(
        self, index: int, text: str, scored: list[Score], reason: FinishReason | None
    ) -> TextChoice:
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = _Legacy(self._llm, self._body.logprobs).arrays(scored)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    async def events(self) -> AsyncIterator[CompletionChunk]:
        """Prompt by prompt: answers to later ones are computed meanwhile, as far as a stream may be
        ahead of its reader."""
        for i in range(len(self._prompts) if not self._requests else 0):
            yield self._chunk(i, self._echo(i), _Legacy(self._llm, 0), [], "length")
        for i, request in enumerate(self._requests):
            legacy = [_Legacy(self._llm, self._body.logprobs or 0) for _ in request.choices]
            to_echo = set(range(len(legacy))) if self._body.echo else set()
            while (piece := await request.next()) is not None:
                choice, mine = piece.choice, legacy[piece.choice]
                index = i * len(legacy) + choice
                if piece.progress is not None:
                    chunk = self._chunk(index, "", mine, [])
                    chunk["prompt_progress"] = prompt_progress(piece.progress)
                    yield chunk
                    continue
                if choice in to_echo:  # now that the prompt has its scores
                    to_echo.remove(choice)
                    yield self._chunk(index, self._echo(i), mine, request.choices[0].scores)
                sequence = request.choices[choice]
                ends = piece.finish_reason is not None and sequence.error is None
                reason = finish_reason(piece.finish_reason) if ends else None
                scored = _scored([piece], sequence)
                if piece.text or reason or (scored and self._body.logprobs is not None):
                    yield self._chunk(index, piece.text, mine, scored, reason)
        last = self._chunk_of([])
        self._add_cache_report(last)
        if self._wants_usage:
            last["usage"] = self._usage()
        if self._wants_usage or "cache_report" in last:
            yield last

    def _chunk(
        self, index: int, text: str, legacy: _Legacy, scored: list[Score],
        reason: FinishReason | None = None,
    ) -> CompletionChunk:  # fmt: skip
        logprobs = legacy.arrays(scored) if self._body.logprobs is not None else None
        chunk = self._chunk_of(
            [{"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}]
        )
        if self._wants_usage:
            chunk["usage"] = None
        return chunk

    @property
    def _wants_usage(self) -> bool:
        options = self._body.stream_options
        return options is not None and bool(options.include_usage)

    def _add_cache_report(self, reply: CacheReported) -> None:
        """Of the first prompt, if it was asked for."""
        if self._body.return_cache_report:
            reply["cache_report"] = cache_report(self._llm, self._requests[0].choices[0])

    def _chunk_of(self, choices: list[TextChoice]) -> CompletionChunk:
        return {
            "id": self._id, "object": "text_completion", "created": self._created,
            "model": self._model, "choices": choices,
        }  # fmt: skip

    def _usage(self) -> Usage:
        n_prompt = sum(map(len, self._prompts))
        sequences = [s for request in self._requests for s in request.choices]
        n_out = sum(len(s.output) for s in sequences)
        cached = sum(request.choices[0].n_cached for request in self._requests)
        return {
            "prompt_tokens": n_prompt, "completion_tokens": n_out,
            "total_tokens": n_prompt + n_out,
            "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip


async def completions(http: HttpRequest) -> Response:
    body = await read(http, CompletionRequest)
    service = await serving(http, body.model)
    llm = service.engine.llm
    if body.suffix is not None and body.echo:
        raise unsupported("echo: not together with suffix.", "echo")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of: it must be n.", "best_of")
    n = check_n(body.n, llm.max_num_seqs)
    service.check_room(n, 0)  # before any work is done for one who is sent away
    prompts = await in_thread(lambda: prompts_of(body, llm, service.allow_special))
    most = _DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    if most == 0 and not body.echo:
        raise ApiError(400, "max_tokens: 0 needs echo.", param="max_tokens")
    params = _params(service, body, most)
    params = params and capped(http, params)
    options = request_options(http, body, service)
    service.check_room(n * len(prompts), n * sum(map(len, prompts)))
    requests: list[Request] = []
    try:
        if params is not None:
            for tokens in prompts:
                request = await service.engine.open(tokens, params, options, n)
                request.remark = remark(service, http, request)
                requests.append(request)
        answer = _Answer(service, body, prompts, requests)
        if body.stream:
            return sse.response(until_left(answer.events(), *requests))
        async with aborted_on_disconnect(http.receive, *requests):
            return JSONResponse(await answer.whole())
    except BaseException:
        give_up(requests)
        raise


def _params(service: Service, body: CompletionRequest, most: int) -> SamplingParams | None:
    """None: the answer is the prompt itself, and nothing is to be computed."""
    is_scored = bool(body.echo) and body.logprobs is not None
    logprobs = 0 if body.logprobs is None else max(1, body.logprobs)
    params = sampling_params(body, service.defaults, most or 1, logprobs)
    if is_scored:
        params = replace(params, prompt_logprobs=logprobs)
        return params if most else replace(params, max_tokens=0)
    return params if most else None
