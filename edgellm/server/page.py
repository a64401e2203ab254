"""The web page at /: one file, no parts from elsewhere, and what the server does at /status."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from functools import cache
from importlib.resources import files

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from edgellm.server.models import Known, Models
from edgellm.server.reply_schemas import ModelStatus, Status


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


async def status(http: HttpRequest) -> Response:
    """What runs, what waits, and how fast; for the page and `edgellm ps`."""
    models: Models = http.app.state.models
    reply: Status = {"models": [_status(known, models.is_draining) for known in models.all()]}
    return JSONResponse(reply)


def _status(known: Known, is_draining: bool) -> ModelStatus:
    service = known.service
    if service is None or known.state != "loaded":
        state = "unloaded" if known.state == "loaded" else known.state
        return {"name": known.name, "state": state}
    engine, name = service.engine, known.name
    found: ModelStatus = {
        "name": name, "state": "ready", "running": len(engine.running),
        "waiting": engine.n_waiting, "tokens_per_second": round(service.rate.per_second, 1),
        "generated": engine.metrics.generation_tokens,
        "kv_cache_usage": round(engine.kv_usage, 4), "n_ctx": engine.llm.n_ctx,
        "seats": engine.llm.max_num_seqs,
    }  # fmt: skip
    if not engine.is_alive:
        found["state"] = "failed"
    elif not engine.is_ready:
        found["state"] = "stalled"
    elif is_draining:
        found["state"] = "draining"
    return found
