"""The application: routes, what guards them, and how it begins and ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from edgellm import __version__
from edgellm.server import metrics, openapi, page
from edgellm.server.errors import ApiError, api_error
from edgellm.server.openapi import Handler
from edgellm.server.routes import ROUTES
from edgellm.server.safety import Guard, Safety
from edgellm.server.service import Service, log


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
        routes=[Route(each.path, _checked(each.handler), methods=[each.method])
                for each in ROUTES],
        middleware=[Middleware(Safety, guard=guard)],
        exception_handlers={HTTPException: _http_error},
        lifespan=lifespan,
    )  # fmt: skip
    app.state.service, app.state.guard, app.state.strict = service, guard, strict
    app.state.rate = rate
    app.state.registry = metrics.registry_of(service, vllm_metrics)
    app.router.redirect_slashes = False  # a path has one name
    app.state.openapi = openapi.document(ROUTES, __version__, bool(guard.keys))
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
    """Of the router: no such path, or no such method of a path."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        answer = ApiError(405, f"This path has other methods: {allowed}.").response(http.url.path)
        answer.headers["allow"] = allowed
        return answer
    return ApiError(404, "There is no such path.").response(http.url.path)
