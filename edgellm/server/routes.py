"""What the server can be asked, and by whom it is answered."""

from __future__ import annotations

from typing import Any

from starlette.convertors import PathConvertor, register_url_convertor

from edgellm.server import (
    anthropic,
    chat,
    completions,
    infill,
    metrics,
    ollama,
    ollama_models,
    openapi,
    page,
    plain,
    responses,
    slots,
    sse,
)
from edgellm.server import anthropic_schemas as a
from edgellm.server import ollama_schemas as o
from edgellm.server import reply_schemas as r
from edgellm.server import responses_schemas as rs
from edgellm.server import schemas as s
from edgellm.server.openapi import Operation


class _Name(PathConvertor):
    """Of a model: whatever it is, slashes included, but not nothing."""

    regex = ".+"


register_url_convertor("name", _Name())

GENERATES = (404, 408, 429, 503)
_MODEL = (404, 503)  # one is looked up, and perhaps loaded
_CHAT_LINE, _GENERATE_LINE = o.ChatLine | o.ChatEnd, o.GenerateLine | o.GenerateEnd
_FAIL = {
    "name": "fail_on_no_slot", "in": "query", "schema": {"type": "string"},
    "description": "Anything but nothing: a 503 while no slot is free.",
}  # fmt: skip
_OF = {
    "name": "model", "in": "query", "schema": {"type": "string"},
    "description": "Of which model, where there are several.",
}  # fmt: skip
_ACTION = {
    "name": "action", "in": "query", "required": True,
    "schema": {"enum": ["save", "restore", "erase"]},
}  # fmt: skip

ROUTES = [
    Operation(
        "POST", "/v1/chat/completions", chat.chat_completions, s.ChatRequest, r.ChatReply,
        r.ChatChunk, sse.OPENAI, GENERATES,
    ),
    Operation(
        "POST", "/v1/completions", completions.completions, s.CompletionRequest, r.CompletionReply,
        r.CompletionChunk, sse.OPENAI, GENERATES,
    ),
    Operation(
        "POST", "/v1/messages", anthropic.messages, a.MessagesRequest, a.MessageReply,
        a.MessageEvent | a.Ping, sse.ANTHROPIC, GENERATES,
    ),
    Operation(
        "POST", "/v1/messages/count_tokens", anthropic.count_tokens, a.CountRequest, a.Counted,
        errors=(404,),
    ),
    Operation(
        "POST", "/v1/responses", responses.responses, rs.ResponsesRequest, rs.ResponseReply,
        rs.ResponseEvent, sse.RESPONSES, GENERATES,
    ),
    Operation(
        "POST", "/v1/embeddings", plain.embeddings, s.EmbeddingRequest, r.EmbeddingReply,
        errors=(404, 503),
    ),
    Operation("GET", "/v1/models", plain.models, reply=r.ModelList),
    Operation("GET", "/v1/models/{name:name}", plain.model, reply=r.Model, errors=(404,)),
    Operation("POST", "/models/load", plain.load, s.ModelRequest, r.Done, errors=(404, 503)),
    Operation("POST", "/models/unload", plain.unload, s.ModelRequest, r.Done, errors=(404, 409)),
    Operation(
        "POST", "/api/chat", ollama.chat, o.OllamaChatRequest, o.ChatEnd | o.ChatLoaded,
        _CHAT_LINE, sse.OLLAMA, (*GENERATES, 409),
    ),
    Operation(
        "POST", "/api/generate", ollama.generate, o.GenerateRequest,
        o.GenerateEnd | o.GenerateLoaded, _GENERATE_LINE, sse.OLLAMA, (*GENERATES, 409),
    ),
    Operation(
        "POST", "/api/embed", ollama_models.api_embed, o.EmbedRequest, o.Embedded,
        errors=(404, 503),
    ),
    Operation("GET", "/api/tags", ollama_models.tags, reply=o.Tags),
    Operation("POST", "/api/show", ollama_models.show, o.ShowRequest, o.Shown, errors=(404, 503)),
    Operation("GET", "/api/ps", ollama_models.ps, reply=o.Running),
    Operation("GET", "/api/version", ollama_models.version, reply=o.Version),
    Operation(
        "POST", "/infill", infill.infill, s.InfillRequest, r.InfillEnd,
        r.InfillPiece | r.InfillEnd, sse.PLAIN, GENERATES,
    ),
    Operation("POST", "/tokenize", plain.tokenize, s.TokenizeRequest, r.Tokenized, errors=_MODEL),
    Operation(
        "POST", "/detokenize", plain.detokenize, s.DetokenizeRequest, r.Detokenized, errors=_MODEL
    ),
    Operation(
        "POST", "/apply-template", chat.apply_template, s.TemplateRequest, r.Prompted,
        errors=_MODEL,
    ),
    Operation(
        "GET", "/tokenizer_info", plain.tokenizer_info, reply=r.TokenizerInfo, errors=_MODEL,
        query=(_OF,),
    ),
    Operation("GET", "/props", plain.props, reply=r.Props, errors=_MODEL, query=(_OF,)),
    Operation("GET", "/", page.page, media="text/html"),
    Operation("GET", "/status", page.status, reply=r.Status),
    Operation("GET", "/slots", slots.slots, reply=list[r.Slot], errors=_MODEL, query=(_FAIL, _OF)),
    Operation(
        "POST", "/slots/{id}", slots.act, s.SlotRequest, r.SlotDone, errors=(404, 503),
        query=(_ACTION, _OF),
    ),
    Operation("GET", "/health", plain.health, reply=r.Health, errors=(503,)),
    Operation("GET", "/v1/health", plain.health, reply=r.Health, errors=(503,)),
    Operation("GET", "/livez", plain.livez, reply=r.Health, errors=(503,)),
    Operation("GET", "/readyz", plain.readyz, reply=r.Readiness, errors=(503,)),
    Operation("GET", "/metrics", metrics.metrics, media="text/plain"),
    Operation("GET", "/openapi.json", openapi.openapi, reply=dict[str, Any]),
]  # fmt: skip
