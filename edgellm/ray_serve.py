"""A model on several machines, under Ray Serve (`pip install 'edgellm[ray]'`).

    serve run edgellm.ray_serve:app model=model.gguf api_key_file=keys.txt num_replicas=2

Each replica has the whole model, an engine and the application of `edgellm serve`, behind the
proxies of Ray. More machines answer more requests; none answers one faster, and a model has to fit
into one machine: there is no tensor or pipeline parallelism across machines here. Models that need
it are what vLLM and SGLang are for.

A session (the header ``x-session-id``) stays with one replica, which has its prompts in the cache,
while that replica lives and has room. When every replica is full, one of them says so as the server
does: 429 with Retry-After. What a proxy refuses because too much waits in it is a 429 with
Retry-After too, without our words.

Proxies import this module as well: the engine is imported where it is made. Ray reads
annotations as they are, so they are not postponed here.
"""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgellm.errors import EdgeLLMError

# A replica takes so many requests more than the server lets wait, to refuse them and to be asked
# how it is.
_SPARE = 64
_RETRY_SECONDS = 2

Names = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda given: given.split(",") if isinstance(given, str) else given),
]


class Settings(BaseModel):
    """What `serve run` takes as NAME=VALUE and a config file under ``args``. Names are those of
    `edgellm serve`; paths have to be good on every machine that may get a replica."""

    model_config = ConfigDict(extra="forbid")

    model: str  # a file, or any name that `edgellm pull` knows
    alias: str | None = None
    api_key_file: Path | None = None  # also LLAMA_API_KEY, in the environment of the replicas
    insecure: bool = False  # no keys, although other machines may reach the proxies
    allowed_host: Names = ()  # under which the proxies are reached; commas between them
    cors_origin: Names = ()
    ctx_size: int | None = Field(None, ge=1)
    parallel: int = Field(8, ge=1)
    max_queue: int | None = Field(None, ge=0)  # None: three for each that runs
    timeout: float = Field(3600.0, ge=1, allow_inf_nan=False)  # seconds
    engine: dict[str, Any] = {}  # further arguments of LLM

    @property
    def room(self) -> int:
        """Requests that a replica takes: what runs and what may wait."""
        from edgellm.server.service import WAITING_PER_SEAT

        waiting = WAITING_PER_SEAT * self.parallel if self.max_queue is None else self.max_queue
        return self.parallel + waiting

    num_cpus: float = Field(1, gt=0)  # of a replica; from 1 on also its threads
    num_replicas: int | None = Field(None, ge=1)  # None: one, or what autoscaling_config says
    autoscaling_config: dict[str, Any] | None = None  # Ray's


def app(settings: Settings) -> Application:
    """For `serve run edgellm.ray_serve:app` and config files."""
    room = settings.room
    scaling: dict[str, Any] = {"num_replicas": settings.num_replicas or 1}
    if settings.autoscaling_config is not None:
        if settings.num_replicas is not None:
            raise EdgeLLMError("num_replicas is what autoscaling_config decides: name one of them.")
        busy = {"target_ongoing_requests": settings.parallel}
        scaling = {"autoscaling_config": busy | settings.autoscaling_config}
    from edgellm.server.run import DRAIN_SECONDS

    made: Application = REPLICA.options(
        ray_actor_options={"num_cpus": settings.num_cpus},
        max_ongoing_requests=room + _SPARE,
        max_queued_requests=room + _SPARE,
        backpressure_config={"status_code": 429, "retry_after_s": _RETRY_SECONDS},
        request_router_config={
            "request_router_class": "edgellm.ray_serve:SessionRouter",
            "request_router_kwargs": {"room": room},
        },
        graceful_shutdown_timeout_s=DRAIN_SECONDS + 5,
        **scaling,
    ).bind(settings)
    return made


def deployment(model: str | Path, **settings: Any) -> Application:
    """The same for `serve.run(deployment("model.gguf", num_replicas=2))`; see Settings."""
    return app(Settings(model=str(model), **settings))


class SessionRouter(ConsistentHashRouter):  # type: ignore[misc]
    """Ray's, but a replica counts as full from ``room`` on, and when all are full the one of the
    session refuses the request itself. Requests without a session go where least is going on."""

    def initialize_state(self, *, room: int, **more: Any) -> None:
        super().initialize_state(num_fallback_replicas=1_000_000, **more)  # all others
        self._room = room
        self._n_mine: Counter[Any] = Counter()  # requests at each replica that came through here

    def on_send_request(self, replica_id: Any) -> None:
        super().on_send_request(replica_id)
        self._n_mine[replica_id] += 1

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        self._n_mine[replica_id] -= 1

    def _n_open(self, replica_id: Any) -> int:
        """What a replica last said of itself knows other proxies' requests, but lags behind a burst
        of this one's."""
        return max(self._n_mine[replica_id], self.replica_queue_len_cache.get(replica_id) or 0)

    async def choose_replicas(self, candidate_replicas: Any, pending_request: Any = None) -> Any:
        await asyncio.sleep(0)  # what was routed just now is sent meanwhile, and counted
        ranks = await super().choose_replicas(candidate_replicas, pending_request)
        if pending_request is None:
            return ranks
        has_session = bool(pending_request.metadata.session_id)

        def cost(rank: Any) -> int:
            n_open = self._n_open(rank[0].replica_id)
            return int(n_open >= self._room) if has_session else n_open

        return sorted(ranks, key=cost)  # stable: else in the order of the hash


class Replica:
    """An engine and its application."""

    def __init__(self, settings: Settings) -> None:
        from edgellm.api_keys import api_keys
        from edgellm.hub import resolve
        from edgellm.server.models import Models
        from edgellm.server.safety import read_caps

        self._settings = settings
        self._keys, self._caps = read_caps(api_keys(settings.api_key_file, "LLAMA_API_KEY"))
        if not self._keys and not settings.insecure:
            raise EdgeLLMError(
                "Other machines may reach the proxies of Ray: name keys with api_key_file or "
                "LLAMA_API_KEY (or accept it with insecure=true)."
            )
        path = resolve(settings.model)
        name = settings.alias or path.stem
        self.models = Models(self._service, lambda path: 0)
        self.models.add(name, path, self._service(name, path))

    def _service(self, name: str, path: Path) -> Any:
        from edgellm.conversation import template_of
        from edgellm.engine import AsyncLLM
        from edgellm.server.service import STALL_SECONDS, Service

        settings = self._settings
        engine = AsyncLLM(
            path, stall_seconds=STALL_SECONDS, n_ctx=settings.ctx_size,
            n_threads=max(1, int(settings.num_cpus)), max_num_seqs=settings.parallel,
            **settings.engine,
        )  # fmt: skip
        template = template_of(engine.llm) if engine.llm.chat_template is not None else None
        return Service(
            engine, name, template, max_queue=settings.room - settings.parallel,
            request_seconds=settings.timeout,
        )  # fmt: skip

    def __serve_build_asgi_app__(self) -> Starlette:
        from edgellm.server.app import make_app
        from edgellm.server.run import DRAIN_SECONDS
        from edgellm.server.safety import Guard, known_hosts

        guard = Guard(
            keys=self._keys, caps=self._caps, hosts=known_hosts("", self._settings.allowed_host),
            origins=self._settings.cors_origin,
        )  # fmt: skip
        made = make_app(self.models, guard, drain_seconds=DRAIN_SECONDS)
        made.add_middleware(GoneIsLeft)
        return made

    async def check_health(self) -> None:
        """Ray replaces a replica for which this raises three times: one that makes no progress."""
        if not self.models.is_alive:
            raise EdgeLLMError("The engine does not work.")


class GoneIsLeft:
    """ASGI middleware: a proxy that cannot be asked any more is a client that has left."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def received() -> Message:
            try:
                return await receive()
            except RayError:
                return {"type": "http.disconnect"}

        await self._app(scope, received if scope["type"] == "http" else receive, send)


REPLICA: Any = serve.deployment(name="edgellm")(serve.ingress()(Replica))
