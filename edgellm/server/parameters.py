"""A request's fields as what the engine takes: SamplingParams and RequestOptions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from starlette.requests import Request as HttpRequest

from edgellm.errors import EdgeLLMError
from edgellm.request_options import RequestOptions
from edgellm.sampling_params import SamplingParams
from edgellm.server.errors import ApiError, unsupported
from edgellm.server.safety import NO_CAPS, Caps
from edgellm.server.schemas import ResponseFormat, Sampled
from edgellm.server.service import Service

_MOST_PIECES = 256  # that a stream may be behind

# Fields that mean the same under the same name in SamplingParams.
_SAME = (
    "seed", "temperature", "top_p", "min_p", "typical_p", "top_n_sigma", "xtc_probability",
    "xtc_threshold", "repeat_penalty", "repeat_last_n", "presence_penalty", "frequency_penalty",
    "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dynatemp_range",
    "dynatemp_exponent", "mirostat", "mirostat_tau", "mirostat_eta", "samplers", "ignore_eos",
    "json_schema", "grammar", "regex", "stop", "reasoning_budget",
)  # fmt: skip


def sampling_params(
    body: Sampled, defaults: SamplingParams, max_tokens: int | None, logprobs: int = 0
) -> SamplingParams:
    """``defaults`` with what the body says. ApiError 400."""
    values: dict[str, Any] = {}
    for name in _SAME:
        if (value := getattr(body, name)) is not None:
            values[name] = value
    if body.top_k is not None:
        values["top_k"] = max(0, body.top_k)  # -1: off, as vLLM has it
    if max_tokens is not None:
        values["max_tokens"] = None if max_tokens < 0 else max_tokens
    if body.logit_bias:
        values["logit_bias"] = _bias(body.logit_bias)
    values |= _structure(body.response_format)
    given = [n for n in ("json_schema", "grammar", "regex") if values.get(n) is not None]
    if len(given) > 1:
        raise ApiError(400, f"Of {' and '.join(given)} only one can be given.", param=given[1])
    try:
        params = SamplingParams(
            **{f: getattr(defaults, f) for f in _fields()} | values | {"logprobs": logprobs}
        )
    except EdgeLLMError as error:
        raise ApiError(400, str(error)) from None
    return params


def _fields() -> list[str]:
    return list(SamplingParams.__dataclass_fields__)


def _bias(given: dict[str, float]) -> dict[int, float]:
    found = {}
    for token, value in given.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise ApiError(400, "logit_bias: its keys are token ids.", param="logit_bias")
        found[int(token)] = value
    return found


def _structure(wanted: ResponseFormat | None) -> dict[str, Any]:
    if wanted is None or wanted.type == "text":
        return {}
    if wanted.type == "json_object":
        schema = wanted.json_object_schema
        return {"json_schema": {"type": "object"} if schema is None else schema}
    if wanted.type == "json_schema":
        inner = wanted.json_schema
        if inner is None or inner.json_schema is None:
            raise ApiError(
                400, "response_format.json_schema.schema is missing.",
                param="response_format.json_schema.schema",
            )  # fmt: skip
        return {"json_schema": inner.json_schema}
    text = wanted.pattern if wanted.type == "regex" else wanted.grammar
    if text is None:
        name = "pattern" if wanted.type == "regex" else "grammar"
        raise ApiError(400, f"response_format.{name} is missing.", param=f"response_format.{name}")
    return {"regex" if wanted.type == "regex" else "grammar": text}


def capped(http: HttpRequest, params: SamplingParams) -> SamplingParams:
    """As far as the client's key lets it ask. ApiError 400."""
    caps: Caps = http.scope.get("state", {}).get("caps", NO_CAPS)  # see safety
    if caps.max_tokens is None:
        return params
    if params.max_tokens is not None and params.max_tokens > caps.max_tokens:
        raise ApiError(
            400, f"max_tokens: at most {caps.max_tokens} with this API key.", param="max_tokens"
        )
    return replace(params, max_tokens=params.max_tokens or caps.max_tokens)


def request_options(http: HttpRequest, body: Sampled, service: Service) -> RequestOptions:
    """Lane, time and cache of a request. Clients with different keys never share a cache."""
    priority = body.priority
    if isinstance(priority, int):  # vLLM's: lower goes first, 0 is the default
        priority = "batch" if priority > 0 else "interactive"
    timeout = service.request_seconds
    if body.timeout is not None:
        timeout = body.timeout if timeout is None else min(timeout, body.timeout)
    return RequestOptions(
        priority=priority or "interactive",
        queue_timeout=service.queue_seconds,
        first_token_timeout=service.first_token_seconds,
        timeout=timeout,
        cache_salt=salt_of(http, body.cache_salt),
        most_pieces=_MOST_PIECES if body.stream else None,
        report_progress=bool(body.stream and body.return_progress),
    )


def salt_of(http: HttpRequest, given: str | None) -> str:
    """What a client's cache is found under: all that it may see begins as with ``given`` None."""
    client = http.scope.get("state", {}).get("client", "")  # see safety
    return f"{client}/{given or ''}"


def check_n(n: int | None, most: int) -> int:
    """How many choices; each takes a seat."""
    if (n or 1) > most:
        raise unsupported(f"n is {n}, and this server runs {most} sequences at once.", "n")
    return n or 1
