"""Small endpoints: models, tokens, embeddings, what the server is and how it is."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from edgellm.server.body import read
from edgellm.server.errors import ApiError, unsupported
from edgellm.server.models import Known, Models, serving
from edgellm.server.reply_schemas import (
    Detokenized,
    Done,
    Embedding,
    EmbeddingReply,
    Health,
    Model,
    ModelList,
    Props,
    Readiness,
    Tokenized,
    TokenizerInfo,
    TokenPiece,
)
from edgellm.server.schemas import (
    DetokenizeRequest,
    EmbeddingRequest,
    ModelRequest,
    TokenizeRequest,
)
from edgellm.server.service import Service, in_thread


def _models(http: HttpRequest) -> Models:
    models: Models = http.app.state.models
    return models


# ---- models --------------------------------------------------------------------------------------


def _model(known: Known) -> Model:
    found: Model = {
        "id": known.name, "object": "model", "created": known.created, "owned_by": "edgellm",
        "status": {"value": known.state},
    }  # fmt: skip
    if known.service is not None:
        llm = known.service.engine.llm
        found["meta"] = {
            "n_ctx": llm.n_ctx, "n_ctx_train": llm.config.n_ctx, "n_vocab": llm.n_vocab,
            "n_embd": llm.config.n_embd, "architecture": llm.config.architecture,
        }  # fmt: skip
    return found


async def models(http: HttpRequest) -> Response:
    reply: ModelList = {"object": "list", "data": [_model(k) for k in _models(http).all()]}
    return JSONResponse(reply)


async def model(http: HttpRequest) -> Response:
    return JSONResponse(_model(_models(http).find(http.path_params["name"])))


async def load(http: HttpRequest) -> Response:
    """llama-server's: the model is loaded when the answer comes."""
    body = await read(http, ModelRequest)
    await _models(http).load(body.model)
    return JSONResponse(_DONE)


async def unload(http: HttpRequest) -> Response:
    body = await read(http, ModelRequest)
    await _models(http).unload(body.model)
    return JSONResponse(_DONE)


# ---- tokens --------------------------------------------------------------------------------------


async def tokenize(http: HttpRequest) -> Response:
    body = await read(http, TokenizeRequest)
    llm = (await serving(http, body.model)).engine.llm
    is_vllm = "prompt" in body.model_fields_set
    text = body.prompt if is_vllm else body.content
    add_special = body.add_special_tokens if is_vllm else body.add_special
    tokens = await in_thread(lambda: llm.tokenize(text, add_special, body.parse_special))
    reply: Tokenized = {"tokens": tokens, "count": len(tokens), "max_model_len": llm.n_ctx}
    if body.with_pieces:
        pieces: list[TokenPiece] = [
            {"id": token, "piece": _piece(llm.tokenizer.piece(token, True))} for token in tokens
        ]
        reply["tokens"] = pieces
    return JSONResponse(reply)


def _piece(raw: bytes) -> str | list[int]:
    """llama-server's: bytes as numbers where they are no text by themselves."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


async def detokenize(http: HttpRequest) -> Response:
    body = await read(http, DetokenizeRequest)
    llm = (await serving(http, body.model)).engine.llm
    if any(token >= llm.n_vocab for token in body.tokens):
        raise ApiError(400, f"tokens: the vocabulary has {llm.n_vocab}.", param="tokens")
    text = llm.detokenize(body.tokens)
    reply: Detokenized = {"content": text, "prompt": text}
    return JSONResponse(reply)


async def tokenizer_info(http: HttpRequest) -> Response:
    """vLLM's: what clients that make prompts of their own have to know, as lm-eval does."""
    llm = (await serving(http, http.query_params.get("model"))).engine.llm
    tokenizer = llm.tokenizer

    def name(token: int | None) -> str | None:
        return None if token is None else tokenizer.token_text(token)

    reply: TokenizerInfo = {
        "tokenizer_class": str(llm.metadata.get("tokenizer.ggml.model", "")),
        "model_max_length": llm.n_ctx,
        "bos_token": name(tokenizer.bos),
        "eos_token": name(tokenizer.eos),
        "chat_template": llm.chat_template,
    }
    return JSONResponse(reply)


# ---- embeddings ----------------------------------------------------------------------------------


async def embed(service: Service, given: list[Any]) -> tuple[list[list[int]], NDArray[np.float32]]:
    """(token ids, vectors) of texts or token ids. ApiError."""
    llm = service.engine.llm
    if not llm.is_encoder:
        raise unsupported(
            f"The model {service.model} generates text; embeddings need an encoder such as bert.",
            "model",
        )
    if not given:
        raise ApiError(400, "input: at least one is needed.", param="input")
    prompts = [llm.tokenize(text) if isinstance(text, str) else text for text in given]
    return prompts, await in_thread(lambda: llm.embed(prompts))


async def embeddings(http: HttpRequest) -> Response:
    body = await read(http, EmbeddingRequest)
    service, given = await serving(http, body.model), body.input
    single = isinstance(given, str) or (given and isinstance(given[0], int))
    prompts, vectors = await embed(service, [given] if single else list(given))
    if body.dimensions is not None and body.dimensions != vectors.shape[1]:
        raise unsupported(f"dimensions: this model has {vectors.shape[1]}.", "dimensions")
    data: list[Embedding] = []
    for i, vector in enumerate(vectors):
        packed = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        value = packed if body.encoding_format == "base64" else vector.tolist()
        data.append({"object": "embedding", "index": i, "embedding": value})
    n = sum(map(len, prompts))
    reply: EmbeddingReply = {
        "object": "list", "data": data, "model": service.model,
        "usage": {"prompt_tokens": n, "total_tokens": n},
    }  # fmt: skip
    return JSONResponse(reply)


# ---- the server itself ---------------------------------------------------------------------------


_OK: Health = {"status": "ok"}
_DONE: Done = {"success": True}


async def health(http: HttpRequest) -> Response:
    """llama-server's."""
    models = _models(http)
    if models.is_ready:
        return JSONResponse(_OK)
    text = "Loading model" if models.is_starting else "The server is not ready."
    return ApiError(503, text).response()


async def livez(http: HttpRequest) -> Response:
    """Whether the process works: its engines' threads run and make progress."""
    if _models(http).is_alive:
        return JSONResponse(_OK)
    return ApiError(503, "An engine does not work.").response()


async def readyz(http: HttpRequest) -> Response:
    """Whether a request would be served now."""
    models = _models(http)
    services = models.services
    has_room = not services or any(service.n_room > 0 for service in services)
    if models.is_ready and has_room:
        reply: Readiness = {"status": "ok", "waiting": sum(s.n_waiting for s in services)}
        return JSONResponse(reply)
    return ApiError(503, "The server is not ready.").response()


async def props(http: HttpRequest) -> Response:
    service = await serving(http, http.query_params.get("model"))
    llm, defaults = service.engine.llm, service.defaults
    reply: Props = {
        "default_generation_settings": {
            "n_ctx": llm.n_ctx, "temperature": defaults.temperature, "top_k": defaults.top_k,
            "top_p": defaults.top_p, "min_p": defaults.min_p,
        },
        "total_slots": llm.max_num_seqs,
        "model_alias": service.model,
        "chat_template": llm.chat_template or "",
        "build_info": "edgellm",
    }  # fmt: skip
    return JSONResponse(reply)
