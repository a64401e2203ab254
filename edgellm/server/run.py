"""From a loaded model to a listening socket."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from edgellm.chat import ChatTemplate
from edgellm.engine import AsyncLLM
from edgellm.errors import EdgeLLMError
from edgellm.llm import LLM
from edgellm.server.app import make_app
from edgellm.server.protocol import limited
from edgellm.server.safety import Guard, known_hosts
from edgellm.server.service import Service

DRAIN_SECONDS = 30
_KEEP_ALIVE_SECONDS = 30
_SEND_BUFFER = 256 << 10  # bytes


def serve(
    llm: LLM,
    *,
    model: str,
    template: ChatTemplate | None,
    address: tuple[str, int],
    keys: tuple[str, ...] = (),
    hosts: tuple[str, ...] = (),
    origins: tuple[str, ...] = (),
    max_queue: int = 64,
    timeout: float = 3600.0,
    strict: bool = False,
    vllm_metrics: bool = False,
    slot_dir: Path | None = None,
    allow_special: bool = False,
    max_connections: int = 1000,
    max_connections_per_client: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Serve until SIGTERM or Ctrl-C; requests under way then have DRAIN_SECONDS to finish."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    engine = AsyncLLM(llm)
    service = Service(
        engine, model, template, max_queue=max_queue, request_seconds=timeout, slot_dir=slot_dir,
        allow_special=allow_special,
    )  # fmt: skip
    guard = Guard(keys=keys, hosts=known_hosts(address[0], hosts), origins=origins)
    app = make_app(
        service, guard, strict=strict, vllm_metrics=vllm_metrics, drain_seconds=DRAIN_SECONDS
    )
    config = configured(app, max_connections, max_connections_per_client)
    listening = listen(*address)
    host, port = listening.getsockname()[:2]
    say(f"{model}, {llm.n_ctx:,} tokens of context, at http://{host}:{port}/v1 (Ctrl-C ends).")
    try:
        _Server(config).run(sockets=[listening])
    finally:
        listening.close()
        engine.close()


def configured(
    app: Starlette, max_connections: int | None = 1000, max_per_client: int | None = None
) -> uvicorn.Config:
    """How uvicorn serves the application."""
    return uvicorn.Config(
        app, log_config=None, access_log=False, server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS, timeout_graceful_shutdown=DRAIN_SECONDS,
        h11_max_incomplete_event_size=32 << 10, http=limited(max_connections, max_per_client),
        ws="none", loop="asyncio",
    )  # fmt: skip


class _Server(uvicorn.Server):
    """SIGTERM and Ctrl-C end it in peace; uvicorn's own raises them again when all is done."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def listen(host: str, port: int) -> socket.socket:
    """Bound before anything is promised, so that a taken port is one sentence. What a client does
    not read is kept in the system's buffer of its connection, which inherits its size from here."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        listening.bind((host, port))
        listening.listen(2048)
    except OSError as error:
        listening.close()
        raise EdgeLLMError(
            f"{host}:{port} cannot be listened at: {error.strerror or error} (--host, --port)."
        ) from None
    return listening
