"""The application: routes, what guards them, and how it begins and ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from edgellm import __version__
from edgellm.server import metrics, openapi
from edgellm.server.errors import ApiError, api_error
from edgellm.server.explained import ARRIVED
from edgellm.server.models import LEASES, Known, Models
from edgellm.server.openapi import Handler
from edgellm.server.routes import ROUTES
from edgellm.server.safety import Guard, Safety
from edgellm.server.service import log

# Threads for what would hold the event loop up: templates, tokens, loading. Not more on more cores:
# what each once needed for a long prompt it may keep.
_WORKERS = 8


def make_app(
    models: Models, guard: Guard, *, strict: bool = False, vllm_metrics: bool = False,
    drain_seconds: float = 30.0,
) -> Starlette:  # fmt: skip
    """``strict``: unknown fields are refused. At its end the application waits ``drain_seconds``
    for the requests under way."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_WORKERS))
        watching = asyncio.create_task(models.watch())
        yield
        watching.cancel()
        await models.close(drain_seconds)

    app = Starlette(
        routes=[Route(each.path, Endpoint(each.handler, models), methods=[each.method])
                for each in ROUTES],
        middleware=[Middleware(Safety, guard=guard)],
        exception_handlers={HTTPException: _http_error},
        lifespan=lifespan,
    )  # fmt: skip
    app.state.models, app.state.guard, app.state.strict = models, guard, strict
    app.state.registry = metrics.registry_of(models, vllm_metrics)
    app.router.redirect_slashes = False  # a path has one name
    app.state.openapi = openapi.document(ROUTES, __version__, bool(guard.keys))
    return app


class Endpoint:
    """A handler as an ASGI application. Models stay loaded until the answer is sent (see
    models.serving); errors become answers, and those of our own are logged, without what the
    client sent."""

    def __init__(self, handler: Handler, models: Models) -> None:
        self._handler, self._models = handler, models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = HttpRequest(scope, receive, send)
        leases: list[Known] = []
        scope[LEASES], scope[ARRIVED] = leases, time.perf_counter()
        try:
            response = await self._answer(http)
            await response(scope, receive, send)
        finally:
            for known in leases:
                self._models.release(known)

    async def _answer(self, http: HttpRequest) -> Response:
        try:
            return await self._handler(http)
        except Exception as error:
            answer = api_error(error)
            if answer.status == 500:
                log.exception("%s %r failed", http.method, http.url.path[:200])
            return answer.response(http.url.path)


async def _http_error(http: HttpRequest, error: Exception) -> Response:
    """Of the router: no such path, or no such method of a path."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        answer = ApiError(405, f"This path has other methods: {allowed}.").response(http.url.path)
        answer.headers["allow"] = allowed
        return answer
    return ApiError(404, "There is no such path.").response(http.url.path)
