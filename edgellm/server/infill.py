"""llama-server's /infill: code between what stands before the cursor and after it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Literal

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from edgellm import fim
from edgellm.llm import LLM
from edgellm.request import Request
from edgellm.server import sse
from edgellm.server.body import read
from edgellm.server.chat_turn import begin_text
from edgellm.server.errors import unsupported
from edgellm.server.explained import cache_report
from edgellm.server.models import serving
from edgellm.server.replies import prompt_progress, timings
from edgellm.server.reply_schemas import InfillEnd, InfillPiece
from edgellm.server.schemas import InfillRequest
from edgellm.server.service import Service, aborted_on_disconnect, in_thread, until_left


def fim_prompt(
    llm: LLM,
    before: str | list[int],
    after: str,
    field: str,
    begun: str = "",
    files: Sequence[tuple[str, str]] = (),
) -> list[int]:
    """Token ids of a prompt with a gap. ApiError, which names ``field``, where the model does not
    know of gaps."""
    try:
        marks = fim.find(llm.metadata, llm.tokenizer)
    except fim.NoFim as error:
        raise unsupported(f"{field}: {error}", field) from None
    tokens = llm.tokenize(before, add_special=False) if isinstance(before, str) else before
    return marks.prompt(llm.tokenizer, tokens, after, begun, files)


def _said(service: Service, content: str) -> InfillPiece:
    return {"index": 0, "content": content, "stop": False, "model": service.model}


def _end(service: Service, content: str, request: Request, body: InfillRequest) -> InfillEnd:
    sequence = request.choices[0]
    kind: Literal["limit", "eos", "word"]
    if sequence.finish_reason == "length":
        kind = "limit"
    else:
        kind = "eos" if sequence.stops.hit is None else "word"
    end: InfillEnd = {
        "index": 0,
        "content": content,
        "stop": True,
        "model": service.model,
        "stop_type": kind,
        "stopping_word": sequence.stops.hit or "",
        "truncated": False,
        "tokens_predicted": len(sequence.output),
        "tokens_evaluated": sequence.n_prompt,
        "tokens_cached": sequence.n_cached,
        "timings": timings(sequence),
    }
    if body.return_cache_report:
        end["cache_report"] = cache_report(service.engine.llm, sequence)
    return end


async def _events(
    service: Service, request: Request, body: InfillRequest
) -> AsyncIterator[InfillPiece | InfillEnd]:
    while (piece := await request.next()) is not None:
        if piece.progress is not None:
            read = _said(service, "")
            read["prompt_progress"] = prompt_progress(piece.progress)
            yield read
        if piece.text:
            yield _said(service, piece.text)
    yield _end(service, "", request, body)


async def infill(http: HttpRequest) -> Response:
    body = await read(http, InfillRequest)
    service = await serving(http, body.model)
    if (body.n or 1) > 1:
        raise unsupported("n: one answer only.", "n")
    files = [(file.filename or "", file.text) for file in body.input_extra or []]
    tokens = await in_thread(
        lambda: fim_prompt(
            service.engine.llm, body.input_prefix, body.input_suffix, "input_suffix",
            body.prompt or "", files,
        )
    )  # fmt: skip
    request = await begin_text(http, service, body, tokens)
    if body.stream:
        return sse.response(until_left(_events(service, request, body), request), sse.PLAIN)
    async with aborted_on_disconnect(http.receive, request):
        content = ""
        while (piece := await request.next()) is not None:
            content += piece.text
        return JSONResponse(_end(service, content, request, body))
