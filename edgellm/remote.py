"""A model behind an OpenAI-style server, for a chat: `edgellm chat --server`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import httpx2

from edgellm.errors import EdgeLLMError
from edgellm.sampling_params import SamplingParams
from edgellm.talk import Talk
from edgellm.thinking import ANSWER, THINKING, Part

_CONNECT_SECONDS = 10.0  # an answer itself may take as long as it takes


class RemoteError(EdgeLLMError):
    """The server does not answer, or refuses."""


def address(url: str) -> str:
    """Of a server, without the /v1 that clients of OpenAI are told."""
    if not url.startswith(("http://", "https://")):
        raise EdgeLLMError(f"{url!r} is no address of a server; it begins with http://.")
    return url.rstrip("/").removesuffix("/v1")


class RemoteServer:
    """Asks a server. RemoteError when it does not answer as it should."""

    def __init__(self, url: str, key: str = "") -> None:
        self.url = address(url)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = httpx2.Client(
            base_url=self.url, headers=headers,
            timeout=httpx2.Timeout(None, connect=_CONNECT_SECONDS),
        )  # fmt: skip

    def get(self, path: str) -> dict[str, Any]:
        """A JSON object."""
        try:
            answer = self._http.get(path)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise self._silent(error) from None
        if answer.status_code != 200:
            raise self._refused(answer)
        try:
            found = answer.json()
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise RemoteError(f"{self.url}{path} is no JSON object.")
        return found

    def events(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The data of a streamed answer."""
        try:
            with self._http.stream("POST", path, json=body) as answer:
                if answer.status_code != 200:
                    answer.read()
                    raise self._refused(answer)
                for line in answer.iter_lines():
                    data = line.removeprefix("data:").strip()
                    if not line.startswith("data:") or data == "[DONE]":
                        continue
                    event = json.loads(data)
                    if "error" in event:
                        raise RemoteError(f"{self.url}: {_message(event)}")
                    yield event
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise self._silent(error) from None
        except ValueError as error:
            if isinstance(error, EdgeLLMError):
                raise
            raise RemoteError(f"{self.url} sent what is not JSON.") from None

    def _silent(self, error: Exception) -> RemoteError:
        return RemoteError(f"No server answers at {self.url}: {error or type(error).__name__}")

    def _refused(self, answer: httpx2.Response) -> RemoteError:
        if answer.status_code == 401:
            return RemoteError(f"{self.url} wants an API key: --api-key-file or OPENAI_API_KEY.")
        try:
            said = _message(answer.json())
        except ValueError:
            said = answer.text[:200]
        return RemoteError(f"{self.url} answered {answer.status_code}: {said}")

    def close(self) -> None:
        self._http.close()


def status(url: str, key: str = "") -> list[dict[str, Any]]:
    """What each model of an edgellm server does."""
    server = RemoteServer(url, key)
    try:
        models = server.get("/status").get("models")
    finally:
        server.close()
    if not isinstance(models, list):
        raise RemoteError(f"{server.url}/status is not as edgellm's.")
    return models


class RemoteModel:
    """A model of a server. ``name`` None: the first that it lists. ``n_ctx`` is 0 where the server
    does not say. RemoteError when there is no such server or model."""

    def __init__(self, url: str, name: str | None = None, key: str = "") -> None:
        self._server = RemoteServer(url, key)
        self.url = self._server.url
        try:
            entries = self._server.get("/v1/models").get("data") or []
            self.names = [str(entry["id"]) for entry in entries]
            self.name = name or (self.names[0] if self.names else "")
            if self.name not in self.names:
                there = ", ".join(self.names) or "none"
                raise RemoteError(f"{self.url} has no model {self.name!r}; it has {there}.")
            meta = next(e for e in entries if e["id"] == self.name).get("meta") or {}
            self.n_ctx = int(meta.get("n_ctx") or 0)
        except (KeyError, TypeError, AttributeError):
            self.close()
            raise RemoteError(f"{self.url}/v1/models is not as OpenAI's.") from None
        except BaseException:
            self.close()
            raise

    def chat(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed answer."""
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        return self._server.events("/v1/chat/completions", {"model": self.name, **usage, **body})

    def close(self) -> None:
        self._server.close()


def _message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    found = error.get("message") if isinstance(error, dict) else None
    return str(found or error)[:500]


class RemoteTalk(Talk):
    """A conversation with it: messages go there as they are, the server has the template."""

    def __init__(
        self, model: RemoteModel, system: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(system, variables)
        self.model = model
        self._n_tokens = 0  # as the server counted them, after the last answer

    @property
    def n_tokens(self) -> int:
        return self._n_tokens if self.messages else 0

    def _answer(self, params: SamplingParams) -> Iterator[Part]:
        answer = self.last
        parts: list[Part] = []
        body = {"messages": self._with_system(), **asked(params)}
        if self.variables:
            body["chat_template_kwargs"] = self.variables
        try:
            for event in self.model.chat(body):
                if usage := event.get("usage"):
                    answer.n_prompt = usage.get("prompt_tokens", 0)
                    answer.n_answer = usage.get("completion_tokens", answer.n_answer)
                    self._n_tokens = answer.n_prompt + answer.n_answer
                answer.timings = event.get("timings") or answer.timings
                for choice in event.get("choices") or ():
                    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
                    for part in _parts(choice.get("delta") or {}):
                        answer.n_answer += 1
                        answer.n_thinking += part.kind == THINKING
                        parts.append(part)
                        yield part
            full = self.model.n_ctx and self._n_tokens >= self.model.n_ctx
            answer.context_full = answer.finish_reason == "length" and bool(full)
        finally:
            if parts or answer.finish_reason is not None:
                self._keep(parts, None)


def _parts(delta: Mapping[str, Any]) -> list[Part]:
    found = [(THINKING, delta.get("reasoning_content")), (ANSWER, delta.get("content"))]
    return [Part(kind, text) for kind, text in found if text]


def asked(params: SamplingParams) -> dict[str, Any]:
    """Fields of a request: what differs from the defaults, for those are the server's to choose."""
    plain = SamplingParams(max_tokens=None)
    found: dict[str, Any] = {}
    for field in fields(params):
        value = getattr(params, field.name)
        if value == getattr(plain, field.name) or field.name == "logprobs":
            continue
        if field.name == "logit_bias":
            value = {str(token): bias for token, bias in value}
        found[field.name] = list(value) if isinstance(value, tuple) else value
    return found
