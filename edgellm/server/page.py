"""The web page at /: one file, no parts from elsewhere, and what the server does at /status."""

from __future__ import annotations

import asyncio
import hashlib
import time
from base64 import b64encode
from collections import deque
from functools import cache
from importlib.resources import files
from typing import Literal

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from edgellm.metrics import Metrics
from edgellm.server.reply_schemas import Status
from edgellm.server.service import Service

_SAMPLE_SECONDS, _SAMPLES = 1.0, 5  # the speed of the last few seconds


@cache
def _page() -> tuple[bytes, dict[str, str]]:
    """(the file, headers that let a browser run what is in it and nothing else)"""
    text = files("edgellm.server").joinpath("page.html").read_text(encoding="utf-8")
    sources = {}
    for tag in ("script", "style"):
        inside = text.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
        digest = b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        sources[tag] = f"{tag}-src 'sha256-{digest}'"
    policy = [
        "default-src 'none'", *sources.values(), "connect-src 'self'", "img-src data:",
        "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
    ]  # fmt: skip
    return text.encode(), {
        "content-security-policy": "; ".join(policy),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }


async def page(http: HttpRequest) -> Response:
    content, headers = _page()
    return Response(content, media_type="text/html", headers=headers)


class Rate:
    """Generated tokens a second, of the last few."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._samples = deque([self._now()], _SAMPLES + 1)

    def _now(self) -> tuple[float, int]:
        return time.monotonic(), self._metrics.generation_tokens

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(_SAMPLE_SECONDS)
            self._samples.append(self._now())

    @property
    def per_second(self) -> float:
        (begun, before), (now, count) = self._samples[0], self._now()
        return (count - before) / max(now - begun, _SAMPLE_SECONDS)


async def status(http: HttpRequest) -> Response:
    """What runs, what waits, and how fast; for the page and `edgellm ps`."""
    service: Service = http.app.state.service
    rate: Rate = http.app.state.rate
    engine = service.engine
    state: Literal["ready", "stalled", "failed"] = "failed"
    if engine.is_alive:
        state = "ready" if engine.is_ready else "stalled"
    reply: Status = {"models": [{
        "name": service.model,
        "state": "draining" if service.is_draining else state,
        "running": len(engine.running),
        "waiting": engine.n_waiting,
        "tokens_per_second": round(rate.per_second, 1),
        "generated": engine.metrics.generation_tokens,
        "kv_cache_usage": round(engine.kv_usage, 4),
        "n_ctx": engine.llm.n_ctx,
        "seats": engine.llm.max_num_seqs,
    }]}  # fmt: skip
    return JSONResponse(reply)
