"""Ollama's small endpoints: what models there are, embeddings, the version."""

from __future__ import annotations

import contextlib
import math
import time
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from edgellm import __version__
from edgellm.hub.facts import full
from edgellm.models import build_graph
from edgellm.quant.gguf import GGUF, GGUFError
from edgellm.server.body import read
from edgellm.server.errors import ApiError, unsupported
from edgellm.server.models import Known, Models, serving
from edgellm.server.ollama import plain_name
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
from edgellm.server.service import in_thread

_NEVER = "9999-12-31T23:59:59Z"
_TEMPLATE = "tokenizer.chat_template"  # shown as the template
_MOST_FILES = 64  # whose facts are kept


@lru_cache(_MOST_FILES)
def _facts(path: Path, changed: int) -> dict[str, Any]:
    return full(path)


async def _model(known: Known) -> HeldModel:
    """GGUFError for a file that is no model."""
    facts = await in_thread(lambda: _facts(known.path, known.created))
    changed = datetime.fromtimestamp(known.created, UTC).isoformat().replace("+00:00", "Z")
    return {
        "name": known.name, "model": known.name, "modified_at": changed,
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
    """Files that are no models are not shown; who asks for one is told."""
    models: Models = http.app.state.models
    reply: Tags = {"models": []}
    for known in models.all():
        with contextlib.suppress(GGUFError):
            reply["models"].append(await _model(known))
    return JSONResponse(reply)


async def ps(http: HttpRequest) -> Response:
    models: Models = http.app.state.models
    reply: Running = {"models": []}
    for known in models.loaded:
        if known.service is not None:
            running: RunningModel = {
                **await _model(known), "expires_at": _expires(models, known), "size_vram": 0,
                "context_length": known.service.engine.llm.n_ctx,
            }  # fmt: skip
            reply["models"].append(running)
    return JSONResponse(reply)


def _expires(models: Models, known: Known) -> str:
    """When it will be unloaded if nobody uses it."""
    left = models.seconds_left(known)
    if left is None:
        return _NEVER
    return (datetime.now(UTC) + timedelta(seconds=left)).isoformat().replace("+00:00", "Z")


async def show(http: HttpRequest) -> Response:
    """From the file: nothing is loaded for it. GGUFError for one that is no model."""
    body = await read(http, ShowRequest)
    models: Models = http.app.state.models
    known = models.find(plain_name(body.model or body.name))
    try:
        model = await _model(known)
        metadata, is_encoder = await in_thread(lambda: _read(known.path))
    except GGUFError as error:
        why = str(error).replace(str(known.path), known.path.name)
        raise ApiError(503, f"The model {known.name!r} cannot be read: {why}") from None
    template = known.service.template if known.service is not None else None
    text = template.source if template is not None else str(metadata.get(_TEMPLATE) or "")
    capabilities: list[Literal["completion", "embedding", "tools", "thinking"]]
    if is_encoder:
        capabilities = ["embedding"]
    else:
        capabilities = ["completion"]
        if "tools" in text:
            capabilities.append("tools")
        if "think" in text:
            capabilities.append("thinking")
    reply: Shown = {
        "license": str(metadata.get("general.license") or ""),
        "modelfile": "", "parameters": "", "template": text,
        "details": model["details"], "modified_at": model["modified_at"],
        "model_info": {k: _plain(v) for k, v in metadata.items() if k != _TEMPLATE},
        "capabilities": capabilities,
    }  # fmt: skip
    return JSONResponse(reply)


def _read(path: Path) -> tuple[dict[str, Any], bool]:
    """(metadata, whether it is an encoder) of a file."""
    with GGUF(path) as model:
        return dict(model.metadata), not build_graph(model)[1].is_causal


def _plain(value: Any) -> str | bool | int | float | None:
    """Arrays are left out, as Ollama leaves them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int) else None


async def api_embed(http: HttpRequest) -> Response:
    body = await read(http, EmbedRequest)
    service = await serving(http, plain_name(body.model))
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
