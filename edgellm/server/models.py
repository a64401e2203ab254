"""The models a server knows: which of them are loaded, which have to make room for others.

A model is loaded when a request names it, and has an engine of its own. To make room, the one that
was used longest ago is unloaded; never one that is in use or pinned. Loading and unloading happen
one at a time, in a thread beside the event loop.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from starlette.requests import Request as HttpRequest

from edgellm.engine import AsyncLLM
from edgellm.errors import EdgeLLMError
from edgellm.memory import available_bytes, bill
from edgellm.quant.gguf import GGUF
from edgellm.server import heap
from edgellm.server.errors import ApiError
from edgellm.server.service import Service, log

State = Literal["unloaded", "loading", "loaded", "unloading"]
_PART = re.compile(r"-(\d{5})-of-\d{5}$")  # of a model in several files
_SPARE = 1.15  # of what a model will take, for buffers and copies while it is read
LEASES = "edgellm.leases"  # of a request, in its scope
_LOOKS_A_TRIM = 15  # seconds, nearly
_LOOK_SECONDS = 1.0  # between looks for models that were idle long enough


@dataclass(eq=False)
class Known:
    """A model's file. ``service`` is there while it is loaded."""

    name: str
    path: Path
    is_pinned: bool = False
    state: State = "unloaded"
    service: Service | None = None
    n_leases: int = 0  # handlers that work with it now
    used: float = field(default_factory=time.monotonic)
    idle_seconds: float | None = None  # its own limit, instead of the server's

    @property
    def created(self) -> int:
        """When the file was last changed, in seconds since 1970; 0 once it is gone."""
        try:
            return int(self.path.stat().st_mtime)
        except OSError:
            return 0

    @property
    def is_in_use(self) -> bool:
        open_requests = self.service.engine.n_open if self.service is not None else 0
        return bool(self.n_leases or open_requests)

    @property
    def is_dead(self) -> bool:
        """Its engine can compute no more: the next request gets a new one."""
        return self.service is not None and not self.service.engine.is_alive


class Models:
    """``load`` makes a Service of (name, path), blocking; ``cost`` says how many bytes it will
    take. ``folder``: every model in it is known. ``most`` may be loaded at once, as far as
    ``available`` bytes of memory allow. One that was not used for ``idle_seconds`` is unloaded."""

    def __init__(
        self, load: Callable[[str, Path], Service], cost: Callable[[Path], int],
        folder: Path | None = None, *, most: int | None = None,
        idle_seconds: float | None = None, available: Callable[[], int] = available_bytes,
    ) -> None:  # fmt: skip
        self._load, self._cost, self._folder, self._available = load, cost, folder, available
        self._most, self._idle_seconds = most, idle_seconds
        self._known: dict[str, Known] = {}
        self._changing = asyncio.Lock()
        self.default: str | None = None  # for requests that name no model
        self.is_draining = self.is_starting = False

    # ---- what there is --------------------------------------------------------------------------

    def add(self, name: str, path: Path, service: Service | None = None) -> Known:
        """A model besides those of the folder; it is pinned. With ``service`` it is loaded."""
        known = self._known[name] = Known(name, path, True)
        if service is not None:
            known.service, known.state = service, "loaded"
        self.default = self.default or name
        return known

    def pin(self, name: str) -> None:
        """Never unload it. EdgeLLMError for one that is not in the folder."""
        self.all()
        if name not in self._known:
            where = self._folder or "this server; --models-dir names a folder"
            raise EdgeLLMError(f"There is no model {name!r} to --pin in {where}.")
        self._known[name].is_pinned = True

    def all(self) -> list[Known]:
        """By name; files that have come to the folder or gone from it since are seen."""
        found = _files(self._folder) if self._folder is not None else {}
        for name, path in found.items():
            if name not in self._known:
                self._known[name] = Known(name, path)
        for name, known in list(self._known.items()):
            gone = name not in found and not known.is_pinned and known.state == "unloaded"
            if gone:
                del self._known[name]
        return sorted(self._known.values(), key=lambda known: known.name)

    @property
    def loaded(self) -> list[Known]:
        return [known for known in self._known.values() if known.service is not None]

    @property
    def services(self) -> list[Service]:
        """Of the loaded models."""
        return [k.service for k in self._known.values() if k.service is not None]

    def find(self, name: str | None) -> Known:
        """404 for a model that is not here; without a name the default, else the only one."""
        known = self._known.get(name or self.default or "")
        if known is not None and known.service is not None:
            return known  # most requests: the folder need not be read
        everything = self.all()
        if not name:
            name = self.default or (everything[0].name if len(everything) == 1 else None)
            if name is None:
                raise ApiError(400, "model: name one; GET /v1/models lists them.", param="model")
        known = self._known.get(name)
        if known is None:
            names = ", ".join(repr(k.name) for k in everything[:10]) or "none"
            raise ApiError(
                404, f"The model {name!r:.100} is not here; this server has {names}.",
                param="model", code="model_not_found",
            )  # fmt: skip
        return known

    # ---- how it is ------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """Every engine works and makes progress."""
        engines = [service.engine for service in self.services]
        return all(engine.is_alive and not engine.is_stalled for engine in engines)

    @property
    def lost_device(self) -> str:
        """A GPU that failed, which no engine of this process can use any more; else nothing."""
        return next(filter(None, (s.engine.llm.lost_device for s in self.services)), "")

    @property
    def is_ready(self) -> bool:
        """Requests are taken."""
        return self.is_alive and not self.is_draining and not self.is_starting

    # ---- use ------------------------------------------------------------------------------------

    async def start(self, name: str) -> None:
        """Load the first model; meanwhile requests for it are refused, as llama-server does."""
        self.is_starting = True
        try:
            async with self._changing:
                await self._bring(self.find(name))
        finally:
            self.is_starting = False

    async def lease(self, name: str | None) -> Known:
        """The model, loaded, and kept so until ``release``. ApiError when that cannot be."""
        known = self.find(name)
        if self.is_starting:
            raise ApiError(503, "Loading model")
        known.n_leases += 1
        try:
            if known.service is None or known.is_dead or known.state != "loaded":
                async with self._changing:
                    if known.is_dead:
                        await self._drop(known)
                    if known.service is None:
                        await self._bring(known)
        except BaseException as error:
            log.error("%s", error)
            self.release(known)
            raise
        known.used = time.monotonic()
        return known

    def release(self, known: Known) -> None:
        known.n_leases -= 1
        known.used = time.monotonic()

    def keep(self, known: Known, seconds: float | None) -> None:
        """For so long after its last use, instead of the server's time; None: as it was."""
        if seconds is not None:
            known.idle_seconds = seconds

    async def load(self, name: str) -> Known:
        known = await self.lease(name)
        self.release(known)
        return known

    async def unload(self, name: str) -> Known:
        """409 while it is in use or pinned."""
        known = self.find(name)
        async with self._changing:
            if known.is_pinned:
                raise ApiError(409, f"The model {known.name!r} is pinned.", param="model")
            if known.is_in_use:
                raise ApiError(409, f"The model {known.name!r} is in use.", param="model")
            await self._drop(known)
        return known

    async def watch(self) -> None:
        """Look after the loaded models, for ever: unload what is idle, replace what has failed."""
        for look in itertools.count():
            await asyncio.sleep(_LOOK_SECONDS)
            if look % _LOOKS_A_TRIM == 0:
                await asyncio.to_thread(heap.trim)
            for known in self.loaded:
                if known.service is not None:
                    known.service.rate.sample()
                    _end_waiting(known.name, known.service.engine)
                if self._is_over(known):
                    async with self._changing:
                        if self._is_over(known):
                            log.info("%s is unloaded: it %s.", known.name,
                                     "has failed" if known.is_dead else "was idle")  # fmt: skip
                            await self._drop(known)

    def _is_over(self, known: Known) -> bool:
        left = self.seconds_left(known)
        return known.is_dead or (left is not None and left <= 0 and not known.is_in_use)

    def seconds_left(self, known: Known) -> float | None:
        """Until it is unloaded if nobody uses it; None: never."""
        limit = self._idle_seconds if known.idle_seconds is None else known.idle_seconds
        if limit is None or math.isinf(limit) or known.is_pinned:
            return None
        return limit if known.is_in_use else max(0.0, known.used + limit - time.monotonic())

    async def close(self, drain_seconds: float) -> None:
        """Let requests under way finish for so long, then end all engines; again is no fault."""
        self.is_draining = True
        for service in self.services:
            service.is_draining = True
        await asyncio.gather(*(s.engine.aclose(drain_seconds) for s in self.services))
        async with self._changing:
            for known in self.loaded:
                await self._drop(known)

    # ---- loading, with the lock held ------------------------------------------------------------

    async def _bring(self, known: Known) -> None:
        if self.is_draining:
            raise ApiError(503, "The server is not taking requests.")
        await self._make_room(known)
        known.state = "loading"
        begun = time.perf_counter()
        try:
            known.service = await asyncio.to_thread(self._load, known.name, known.path)
            known.state = "loaded"
        except (ValueError, MemoryError, OSError) as error:  # EdgeLLMError is a ValueError
            why = str(error).replace(str(known.path), known.path.name)  # folders are not told
            why = why or "there is not enough memory."
            raise ApiError(
                503, f"The model {known.name!r} cannot be loaded: {why}", param="model"
            ) from error
        finally:
            if known.service is None:
                known.state = "unloaded"
        log.info("%s is loaded, in %.1f s.", known.name, time.perf_counter() - begun)

    async def _make_room(self, known: Known) -> None:
        """Unload others until there is memory for one more. 503 when too many are in use."""
        needed = await asyncio.to_thread(self._cost, known.path)
        while True:
            too_many = self._most is not None and len(self.loaded) >= self._most
            free = self._available()
            if not too_many and (needed <= free or not self.loaded):
                return  # alone, the system's word counts: it knows of caches that can be given up
            idle = [k for k in self.loaded if not k.is_pinned and not k.is_in_use]
            if not idle:
                sizes = f"{needed / 1e6:,.0f} MB and {max(free, 0) / 1e6:,.0f} MB are free"
                why = f"{len(self.loaded)} are loaded" if too_many else f"it needs {sizes}"
                raise ApiError(
                    503, f"There is no room for the model {known.name!r}: {why}, and the loaded "
                    "ones are in use or pinned; try again later.", param="model",
                )  # fmt: skip
            last = min(idle, key=lambda k: k.used)
            log.info("%s is unloaded to make room for %s.", last.name, known.name)
            await self._drop(last)

    async def _drop(self, known: Known) -> None:
        service, known.service = known.service, None
        if service is None:
            return
        known.state = "unloading"
        try:
            await service.engine.aclose()
            await asyncio.to_thread(service.engine.llm.close)
        finally:
            known.state = "unloaded"
        del service
        gc.collect()
        await asyncio.to_thread(heap.trim)


def _end_waiting(name: str, engine: AsyncLLM) -> None:
    """Nobody waits for an engine that is stuck."""
    if engine.is_alive and engine.is_stalled and engine.n_open:
        log.error(
            "%s makes no progress: %d requests are open, %d run, %d wait; this step has taken "
            "%.1f s.", name, engine.n_open, len(engine.running), engine.n_waiting,
            engine.step_seconds_now,
        )  # fmt: skip
        engine.lose(f"The model {name!r} makes no progress.")


def _files(folder: Path) -> dict[str, Path]:
    """Models of a folder by name: the first file of those in several."""
    found: dict[str, Path] = {}
    try:
        paths = sorted(path for path in folder.glob("*.gguf") if path.is_file())
    except OSError as error:
        log.warning("%s cannot be read: %s", folder, error)
        return found
    for path in paths:
        part = _PART.search(path.stem)
        if part is None or int(part[1]) == 1:
            found[path.stem[: part.start()] if part else path.stem] = path
    return found


def cost(path: Path, n_ctx: int, type_k: str = "f16", type_v: str = "f16") -> int:
    """Bytes that a model will take with one context full; 0 where its file does not say, so that
    loading says why."""
    try:
        with GGUF(path) as model:
            return int(_SPARE * bill(model, n_ctx, type_k, type_v).total)
    except (ValueError, OSError):  # GGUFError is a ValueError, too
        return 0


async def serving(http: HttpRequest, name: str | None = None) -> Service:
    """What serves the model that a request names, loaded until the request is answered (see
    app.Endpoint). ApiError."""
    models: Models = http.app.state.models
    known = await models.lease(name)
    http.scope[LEASES].append(known)
    assert known.service is not None
    return known.service
