"""The application: routes, what guards them, and how it begins and ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from edgellm import __version__
from edgellm.server import (
    anthropic,
    anthropic_schemas,
    chat,
    completions,
    infill,
    metrics,
    ollama,
    ollama_models,
    ollama_schemas,
    openapi,
    page,
    plain,
    responses,
    responses_schemas,
    schemas,
    slots,
)
from edgellm.server.body import Body
from edgellm.server.errors import ApiError, api_error
from edgellm.server.safety import Guard, Safety
from edgellm.server.service import Service, log

Handler = Callable[[HttpRequest], Awaitable[Response]]
ROUTES: list[tuple[str, str, Handler, type[Body] | None]] = [
    ("POST", "/v1/chat/completions", chat.chat_completions, schemas.ChatRequest),
    ("POST", "/v1/completions", completions.completions, schemas.CompletionRequest),
    ("POST", "/v1/messages", anthropic.messages, anthropic_schemas.MessagesRequest),
    ("POST", "/v1/messages/count_tokens", anthropic.count_tokens, anthropic_schemas.CountRequest),
    ("POST", "/v1/responses", responses.responses, responses_schemas.ResponsesRequest),
    ("POST", "/v1/embeddings", plain.embeddings, schemas.EmbeddingRequest),
    ("GET", "/v1/models", plain.models, None),
    ("GET", "/v1/models/{name:path}", plain.model, None),
    ("POST", "/api/chat", ollama.chat, ollama_schemas.OllamaChatRequest),
    ("POST", "/api/generate", ollama.generate, ollama_schemas.GenerateRequest),
    ("POST", "/api/embed", ollama_models.api_embed, ollama_schemas.EmbedRequest),
    ("GET", "/api/tags", ollama_models.tags, None),
    ("POST", "/api/show", ollama_models.show, ollama_schemas.ShowRequest),
    ("GET", "/api/ps", ollama_models.ps, None),
    ("GET", "/api/version", ollama_models.version, None),
    ("GET", "/", plain.root, None),
    ("POST", "/infill", infill.infill, schemas.InfillRequest),
    ("POST", "/tokenize", plain.tokenize, schemas.TokenizeRequest),
    ("POST", "/detokenize", plain.detokenize, schemas.DetokenizeRequest),
    ("POST", "/apply-template", chat.apply_template, schemas.TemplateRequest),
    ("GET", "/", page.page, None),
    ("GET", "/status", page.status, None),
    ("GET", "/props", plain.props, None),
    ("GET", "/slots", slots.slots, None),
    ("POST", "/slots/{id}", slots.act, schemas.SlotRequest),
    ("GET", "/health", plain.health, None),
    ("GET", "/v1/health", plain.health, None),
    ("GET", "/livez", plain.livez, None),
    ("GET", "/readyz", plain.readyz, None),
    ("GET", "/metrics", metrics.metrics, None),
    ("GET", "/openapi.json", openapi.openapi, None),
]


def make_app(
    service: Service, guard: Guard, *, strict: bool = False, vllm_metrics: bool = False,
    drain_seconds: float = 30.0,
) -> Starlette:  # fmt: skip
    """``strict``: unknown fields are refused. At its end the application waits ``drain_seconds``
    for the requests under way."""

    rate = page.Rate(service.engine.metrics)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        watching = asyncio.create_task(rate.watch())
        yield
        watching.cancel()
        service.is_draining = True
        await service.engine.aclose(drain_seconds)

    app = Starlette(
        routes=[Route(path, _checked(handler), methods=[method])
                for method, path, handler, _ in ROUTES],
        middleware=[Middleware(Safety, guard=guard)],
        exception_handlers={HTTPException: _http_error},
        lifespan=lifespan,
    )  # fmt: skip
    app.state.service, app.state.guard, app.state.strict = service, guard, strict
    app.state.rate = rate
    app.state.registry = metrics.registry_of(service, vllm_metrics)
    listed = [(method, path, body) for method, path, _, body in ROUTES]
    app.state.openapi = openapi.document(listed, __version__)
    return app


def _checked(handler: Handler) -> Handler:
    """Errors as answers; those of our own are logged, without what the client sent."""

    async def endpoint(http: HttpRequest) -> Response:
        try:
            return await handler(http)
        except Exception as error:
            answer = api_error(error)
            if answer.status == 500:
                log.exception("%s %r failed", http.method, http.url.path[:200])
            return answer.response(http.url.path)

    return endpoint


async def _http_error(http: HttpRequest, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    if status == 404:
        return ApiError(404, "There is no such path.").response(http.url.path)
    if status == 405:
        return ApiError(405, "This path has other methods.").response(http.url.path)
    return ApiError(400, "The request cannot be understood.").response(http.url.path)
