"""What every request has to pass before it is routed: where it comes from, whose it is. And what a
body has to be before it is read.

Everything is refused that is not allowed: an API key guards every route but the public ones, a Host
header has to be known (DNS rebinding), a browser's Origin allowed, and a body must be JSON of a
moderate size (which makes browsers ask first: preflights are answered for allowed origins alone).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgellm.errors import EdgeLLMError
from edgellm.server.errors import ApiError

PUBLIC = frozenset(("/", "/health", "/v1/health", "/livez", "/readyz"))  # / is the page alone
_PREFLIGHT = {
    "access-control-allow-methods": "GET, POST",
    "access-control-allow-headers": "authorization, content-type, x-api-key, anthropic-version",
    "access-control-max-age": "600",
}
LOCAL = ("localhost", "127.0.0.1", "[::1]")
MOST_HEADER_BYTES, MOST_HEADERS, MOST_URL_BYTES = 16 << 10, 64, 8 << 10


@dataclass(frozen=True)
class Caps:
    """What one API key may ask for: tokens of an answer, and requests at once."""

    max_tokens: int | None = None
    concurrency: int | None = None


NO_CAPS = Caps()


def read_caps(keys: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, Caps]]:
    """Keys of a server and what each may ask for: a line of the file goes on with max_tokens=N or
    concurrency=N, or with both."""
    found: dict[str, Caps] = {}
    for line in keys:
        key, *words = line.split()
        numbers: dict[str, int] = {}
        for word in words:
            name, _, value = word.partition("=")
            known = name in ("max_tokens", "concurrency") and value.isascii() and value.isdecimal()
            if not known or not int(value):
                raise EdgeLLMError(
                    f"--api-key-file: {word!r} behind a key is neither max_tokens=N nor "
                    "concurrency=N."
                )
            numbers[name] = int(value)
        found[key] = Caps(**numbers)
    return tuple(found), found


@dataclass(frozen=True)
class Guard:
    """``keys``: none, and everybody may ask; ``caps`` of some of them. ``hosts``: names in Host
    headers, without port."""

    keys: tuple[str, ...] = ()
    caps: Mapping[str, Caps] = field(default_factory=dict)
    hosts: tuple[str, ...] = LOCAL
    origins: tuple[str, ...] = ()
    most_body_bytes: int = 8 << 20
    body_seconds: float = 30.0
    body_grace_seconds: float = 5.0
    least_body_rate: float = 1024.0  # bytes/s, but for the grace


class Safety:
    """ASGI middleware. The digest of the client's key becomes ``scope["state"]["client"]``."""

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app, self._guard = app, guard
        self._digests = {_digest(key): guard.caps.get(key, NO_CAPS) for key in guard.keys}
        self._n_open: Counter[str] = Counter()  # requests under way, by key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if origin in self._guard.origins:  # not the server's own page
            send = _shared(send, origin)
        try:
            self._check(scope, headers)
            if origin in self._guard.origins and _is_preflight(scope, headers):
                await Response(status_code=204, headers=_PREFLIGHT)(scope, receive, send)
                return
            if self._digests and scope["path"] not in PUBLIC:
                self._authenticate(scope, headers)
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send)
            return
        client = scope.get("state", {}).get("client", "")
        self._n_open[client] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._n_open[client] -= 1

    def _check(self, scope: Scope, headers: Headers) -> None:
        guard = self._guard
        if scope["http_version"] not in ("1.0", "1.1"):
            raise ApiError(400, "This server speaks HTTP/1.1.", close=True)
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if size > MOST_HEADER_BYTES or len(scope["headers"]) > MOST_HEADERS:
            raise ApiError(400, "The request has too many or too long headers.")
        if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > MOST_URL_BYTES:
            raise ApiError(400, "The URL is too long.")
        if "transfer-encoding" in headers and "content-length" in headers:
            # who stands between may have found another end of this request (RFC 9112, 6.3)
            raise ApiError(
                400, "A request has one length: Content-Length or Transfer-Encoding.", close=True
            )
        hosts = headers.getlist("host")
        if len(hosts) != 1 or _name(hosts[0]) not in guard.hosts:
            raise ApiError(
                400 if not hosts else 403,
                "The Host header names a host that this server is not known by (--allowed-host).",
            )
        origin = headers.get("origin")
        own = (f"http://{hosts[0]}", f"https://{hosts[0]}")  # the page that this server sent
        if origin is not None and origin not in (*own, *guard.origins):
            raise ApiError(403, "Requests of this origin are not allowed (--cors-origin).")

    def _authenticate(self, scope: Scope, headers: Headers) -> None:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")
        mine = _digest(key.strip())
        # all are compared, so that time does not tell which one was nearly right
        found = [caps for known, caps in self._digests.items() if hmac.compare_digest(mine, known)]
        if not found:
            raise ApiError(401, "An API key is needed: Authorization: Bearer KEY.")
        client, caps = mine.hex(), found[0]
        if caps.concurrency is not None and self._n_open[client] >= caps.concurrency:
            raise ApiError(429, f"With this API key {caps.concurrency} requests may run at once.")
        scope.setdefault("state", {}).update(client=client, caps=caps)


def _is_preflight(scope: Scope, headers: Headers) -> bool:
    """A browser asks whether a page of another origin may send what it wants to send."""
    return scope["method"] == "OPTIONS" and "access-control-request-method" in headers


def _shared(send: Send, origin: str) -> Send:
    """With the header that lets a page of that origin read the answer."""

    async def send_with_origin(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [
                *message.get("headers", []),
                (b"access-control-allow-origin", origin.encode("latin-1")),
                (b"vary", b"origin"),
            ]
        await send(message)

    return send_with_origin


def check_body(headers: Headers, guard: Guard) -> None:
    """That a body is JSON of a moderate size, as far as headers say so. ApiError."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "The body must be JSON: Content-Type: application/json.")
    if headers.get("content-encoding", "identity") != "identity":
        raise ApiError(415, "The body must not be compressed.")
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > guard.most_body_bytes:
        raise too_large(guard)


def too_large(guard: Guard) -> ApiError:
    return ApiError(413, f"The body is larger than {guard.most_body_bytes:,} bytes.")


async def read_body(headers: Headers, receive: Receive, guard: Guard) -> bytes:
    """The whole body, within its size and time. ApiError."""
    check_body(headers, guard)
    parts: list[bytes] = []
    size, begun = 0, asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(None) as limit:
            while True:
                patience = guard.body_grace_seconds + size / guard.least_body_rate
                limit.reschedule(begun + min(guard.body_seconds, patience))
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ApiError(400, "The request ended before its body.")
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > guard.most_body_bytes:
                    raise too_large(guard)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise ApiError(408, "The body did not come in time.", close=True) from None


def known_hosts(bound: str, more: Iterable[str]) -> tuple[str, ...]:
    """Host names that are this server's: the local ones, what it is bound to, and ``more``."""
    own = (bound,) if bound not in ("0.0.0.0", "::", "") else ()
    return tuple(dict.fromkeys([*LOCAL, *(name.lower() for name in (*own, *more))]))


def _name(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        return host.partition("]")[0].lower() + "]"
    return host.partition(":")[0].lower()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()
