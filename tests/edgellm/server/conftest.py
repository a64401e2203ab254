"""A real server on a tiny model: a socket, uvicorn in a thread, real clients."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from contract import Contract

from edgellm import LLM
from edgellm.conversation import template_of
from edgellm.engine import AsyncLLM
from edgellm.server.app import make_app
from edgellm.server.models import Models
from edgellm.server.run import configured, listen
from edgellm.server.safety import Guard
from edgellm.server.service import Service

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def no_others(name: str, path: Path) -> Service:
    raise AssertionError("there is one model, and it is loaded")


class Running:
    """``http`` asks it and checks that replies are what its OpenAPI document says; ``llm`` is what
    runs behind it."""

    def __init__(self, path: Path, guard: Guard, app: dict[str, Any], **options: Any) -> None:
        connections = options.pop("connections", ())
        service_options = {
            k: options.pop(k) for k in ("max_queue", "slot_dir", "allow_special") if k in options
        }
        self.llm = LLM(path, n_threads=2, **options)
        self.engine = AsyncLLM(self.llm)
        template = template_of(self.llm, None) if self.llm.chat_template else None
        self.service = Service(self.engine, "tiny", template, **service_options)
        self.models = Models(no_others, lambda path: 0)
        self.models.add("tiny", path, self.service)
        application = make_app(self.models, guard, drain_seconds=0, **app)
        self._server = uvicorn.Server(configured(application, *connections))
        self._socket = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        contract = Contract(application.state.openapi)
        self.http = httpx.Client(
            base_url=self.url, timeout=60, event_hooks={"response": [_read, contract.check]}
        )

    def post(self, path: str, body: dict[str, Any], **more: Any) -> httpx.Response:
        return self.http.post(path, json=body, **more)

    def until(self, condition: Callable[[], bool], seconds: float = 5.0) -> float:
        """Wait; how long it took."""
        begun = time.perf_counter()
        while not condition():
            assert time.perf_counter() - begun < seconds
            time.sleep(0.002)
        return time.perf_counter() - begun

    def is_idle(self) -> bool:
        return self.llm.is_idle and self.engine.n_open == 0

    def stop(self) -> None:
        self.http.close()
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
        self.engine.close()
        self.llm.close()


def _read(reply: httpx.Response) -> None:
    """Whole, so that it can be checked, where it is not a stream."""
    if reply.headers.get("content-type") == "application/json":
        reply.read()


@pytest.fixture(scope="session")
def start(tiny_model: Callable[..., Path]) -> Iterator[Callable[..., Running]]:
    """A function that starts a server, with options of LLM; all end with the tests."""
    running: list[Running] = []

    def begin(
        guard: Guard | None = None, app: dict[str, Any] | None = None, name: str = "llama",
        template: str = TEMPLATE, controls: tuple[str, ...] = (), path: Path | None = None,
        **options: Any,
    ) -> Running:  # fmt: skip
        path = path or tiny_model(name, template=template, n_ctx=2048, controls=controls)
        server = Running(path, guard or Guard(), app or {}, **options)
        running.append(server)
        return server

    yield begin
    for server in running:
        server.stop()


@pytest.fixture(scope="session")
def server(start: Callable[..., Running]) -> Running:
    return start(n_ctx=512, max_num_seqs=4)
