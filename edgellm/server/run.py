"""From models to a listening socket."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from edgellm.errors import EdgeLLMError
from edgellm.kernels.cuda.device import DeviceError
from edgellm.server import heap
from edgellm.server.app import make_app
from edgellm.server.models import Models
from edgellm.server.protocol import limited
from edgellm.server.safety import Caps, Guard, known_hosts

DRAIN_SECONDS = 30
_LAST_SECONDS = 0.8  # from the second signal, or from the end of the first one's time
_INTERRUPTED = 130
_KEEP_ALIVE_SECONDS = 30
_SEND_BUFFER = 256 << 10  # bytes


@dataclass(frozen=True)
class Settings:
    """How a server listens. ``address``: host and port; ``hosts``: further names of its own;
    ``origins`` of web pages that may ask; with ``strict`` unknown fields are refused."""

    address: tuple[str, int]
    keys: tuple[str, ...] = ()
    caps: Mapping[str, Caps] = field(default_factory=dict)  # of keys
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    strict: bool = False
    vllm_metrics: bool = False
    max_connections: int = 1000
    max_connections_per_client: int | None = None


def serve(models: Models, settings: Settings, say: Callable[[str], None]) -> None:
    """Listen, load the model that is known first, if any, and serve until SIGTERM or Ctrl-C;
    requests under way then have DRAIN_SECONDS to finish. EdgeLLMError when it cannot be loaded,
    DeviceError when a GPU failed."""
    heap.share()
    guard = Guard(
        keys=settings.keys, caps=settings.caps, origins=settings.origins,
        hosts=known_hosts(settings.address[0], settings.hosts),
    )  # fmt: skip
    app = make_app(
        models, guard, strict=settings.strict, vllm_metrics=settings.vllm_metrics,
        drain_seconds=DRAIN_SECONDS,
    )  # fmt: skip
    config = configured(app, settings.max_connections, settings.max_connections_per_client)
    listening = listen(*settings.address)
    host, port = listening.getsockname()[:2]

    def ready() -> None:
        what = ", ".join(
            f"{service.model}, {service.engine.llm.n_ctx:,} tokens of context"
            for service in models.services
        ) or f"{len(models.all())} models"  # fmt: skip
        say(f"{what}, at http://{host}:{port}/v1 (Ctrl-C ends).")

    server = _Server(config, models, ready)
    try:
        server.run(sockets=[listening])
    finally:
        listening.close()
    if server.failure is not None:
        raise server.failure


def configured(
    app: Starlette, max_connections: int | None = 1000, max_per_client: int | None = None
) -> uvicorn.Config:
    """How uvicorn serves the application."""
    return uvicorn.Config(
        app, log_config=None, access_log=False, server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS, timeout_graceful_shutdown=DRAIN_SECONDS + 1,
        h11_max_incomplete_event_size=32 << 10, http=limited(max_connections, max_per_client),
        ws="none", loop="asyncio",
    )  # fmt: skip


class _Server(uvicorn.Server):
    """Loads the first model while it listens already, and calls ``ready`` then. The first SIGTERM
    or Ctrl-C ends it in peace; the second, or one while it is loading, at once."""

    def __init__(self, config: uvicorn.Config, models: Models, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._models, self._ready = models, ready
        self._first: asyncio.Task[None] | None = None
        self.failure: Exception | None = None  # why it ends by itself

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._first = asyncio.create_task(self._load())

    async def _load(self) -> None:
        try:
            if self._models.default is not None:
                await self._models.start(self._models.default)
            self._ready()
        except Exception as error:  # its cause is what loading said
            self.failure = error.__cause__ if isinstance(error.__cause__, Exception) else error
            self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        if self.failure is None and (lost := self._models.lost_device):
            self.failure = DeviceError(f"{lost} failed: the server ends, a new one can use it.")
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._models.is_draining = True  # before connections are waited for
        drained = asyncio.create_task(self._models.close(DRAIN_SECONDS))
        await super().shutdown(sockets)
        await drained

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._models.is_starting:  # in a thread that cannot be stopped; nothing is at stake
            os._exit(_INTERRUPTED if sig == signal.SIGINT else 0)
        patience = _LAST_SECONDS if self.should_exit else DRAIN_SECONDS + _LAST_SECONDS
        # also when a kernel is stuck, whose thread would be waited for
        last = threading.Timer(patience, os._exit, [1])
        last.daemon = True
        last.start()
        self.force_exit = self.should_exit
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own raises them again when all is done."""
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
    # named, or asyncio would not turn Nagle's algorithm off for what is accepted here
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
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
