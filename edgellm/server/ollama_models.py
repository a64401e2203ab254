"""Ollama's small endpoints: what models there are, embeddings, the version."""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from edgellm import __version__
from edgellm.hub.facts import full
from edgellm.server.body import read
from edgellm.server.errors import unsupported
from edgellm.server.ollama import check_model
from edgellm.server.ollama_schemas import (
    Embedded,
    EmbedRequest,
    HeldModel,
    ModelDetails,
    Running,
    RunningModel,
    Shown,
    ShowRequest,
    Tags,
    Version,
)
from edgellm.server.plain import embed
from edgellm.server.service import Service, in_thread

_NEVER = "9999-12-31T23:59:59Z"
_facts = lru_cache(maxsize=4)(full)


async def _model(service: Service) -> HeldModel:
    path = Path(service.engine.llm.path)
    facts = await in_thread(lambda: _facts(path))
    changed = datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z")
    return {
        "name": service.model, "model": service.model, "modified_at": changed,
        "size": facts["bytes"], "digest": "", "details": _details(facts),
    }  # fmt: skip


def _details(facts: dict[str, Any]) -> ModelDetails:
    n = facts["parameters"]
    size = f"{n / 1e9:.1f}B" if n >= 1e9 else f"{n / 1e6:.2f}M"
    return {
        "parent_model": "", "format": "gguf", "family": facts["architecture"],
        "families": [facts["architecture"]], "parameter_size": size,
        "quantization_level": facts["quant"],
    }  # fmt: skip


async def tags(http: HttpRequest) -> Response:
    reply: Tags = {"models": [await _model(http.app.state.service)]}
    return JSONResponse(reply)


async def ps(http: HttpRequest) -> Response:
    service: Service = http.app.state.service
    running: RunningModel = {
        **await _model(service),
        "expires_at": _NEVER,
        "size_vram": 0,
        "context_length": service.engine.llm.n_ctx,
    }
    reply: Running = {"models": [running]}
    return JSONResponse(reply)


async def show(http: HttpRequest) -> Response:
    service: Service = http.app.state.service
    body = await read(http, ShowRequest)
    check_model(service, body.model or body.name)
    llm, model = service.engine.llm, await _model(service)
    template = service.template.source if service.template is not None else ""
    capabilities: list[Literal["completion", "embedding", "tools", "thinking"]]
    if llm.is_encoder:
        capabilities = ["embedding"]
    else:
        capabilities = ["completion"]
        if "tools" in template:
            capabilities.append("tools")
        if "think" in template:
            capabilities.append("thinking")
    reply: Shown = {
        "license": _facts(Path(llm.path))["licence"] or "",
        "modelfile": "", "parameters": "", "template": template,
        "details": model["details"], "modified_at": model["modified_at"],
        "model_info": {k: _plain(v) for k, v in llm.metadata.items() if k not in _LONG},
        "capabilities": capabilities,
    }  # fmt: skip
    return JSONResponse(reply)


_LONG = ("tokenizer.chat_template",)  # shown as the template


def _plain(value: Any) -> str | bool | int | float | None:
    """Arrays are left out, as Ollama leaves them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int) else None


async def api_embed(http: HttpRequest) -> Response:
    service: Service = http.app.state.service
    body = await read(http, EmbedRequest)
    check_model(service, body.model)
    begun = time.perf_counter()
    texts = [body.input] if isinstance(body.input, str) else body.input
    prompts, vectors = await embed(service, list(texts))
    n_embd = service.engine.llm.config.n_embd
    if body.dimensions is not None and body.dimensions != n_embd:
        raise unsupported(f"dimensions: this model has {n_embd}.", "dimensions")
    reply: Embedded = {
        "model": body.model, "embeddings": vectors.tolist(),
        "total_duration": round(1e9 * (time.perf_counter() - begun)), "load_duration": 0,
        "prompt_eval_count": sum(map(len, prompts)),
    }  # fmt: skip
    return JSONResponse(reply)


async def version(http: HttpRequest) -> Response:
    reply: Version = {"version": __version__}
    return JSONResponse(reply)
