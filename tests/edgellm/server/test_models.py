"""Which models are loaded: on demand, by memory, never while in use."""

import asyncio
import contextlib
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.errors import EdgeLLMError
from edgellm.server.errors import ApiError
from edgellm.server.models import Known, Models

MEMORY = 100


class FakeEngine:
    def __init__(self, world, size):
        self.world, self.size, self.n_open, self.is_alive, self.llm = world, size, 0, True, self
        self.is_stalled = False
        world.used += size

    async def aclose(self, drain=0.0):
        assert self.n_open == 0 or drain
        self.is_alive = False

    def close(self):
        self.world.used -= self.size


class FakeService:
    def __init__(self, engine):
        self.engine, self.is_draining, self.rate = engine, False, self

    def sample(self):
        """What a rate does every second."""


class World:
    """Models of 10, 20, ... bytes in a folder, on a machine with MEMORY bytes."""

    def __init__(self, folder: Path, n=6, **options):
        self.used, self.loads, self.broken, self.folder = 0, [], set(), folder
        for k in range(1, n + 1):
            (folder / f"m{k}.gguf").touch()
        self.models = Models(self.load, self.cost, folder, available=self.free, **options)

    def free(self):
        return MEMORY - self.used

    @staticmethod
    def cost(path):
        return 10 * int(path.stem[1:])

    def load(self, name, path):
        time.sleep(0.001)
        if name in self.broken:
            raise EdgeLLMError("it is broken.")
        self.loads.append(name)
        return FakeService(FakeEngine(self, self.cost(path)))


def status(error: pytest.ExceptionInfo[ApiError]) -> int:
    return error.value.status


def test_names_are_those_of_the_folder(tmp_path):
    world = World(tmp_path, 2)
    for name in ("big-00001-of-00002.gguf", "big-00002-of-00002.gguf", "note.txt"):
        (tmp_path / name).touch()
    (tmp_path / "folder.gguf").mkdir()
    models = world.models
    assert [k.name for k in models.all()] == ["big", "m1", "m2"]
    (tmp_path / "m2.gguf").unlink()
    (tmp_path / "new.gguf").touch()
    assert [k.name for k in models.all()] == ["big", "m1", "new"]
    for name in ("m2", "../m1", "m1.gguf", "note", "a" * 500):
        with pytest.raises(ApiError) as error:
            models.find(name)
        assert status(error) == 404 and len(str(error.value)) < 400
    with pytest.raises(ApiError) as error:
        models.find(None)
    assert status(error) == 400
    models.add("here", tmp_path / "m1.gguf")
    assert models.find(None).name == "here"


def test_the_one_used_longest_ago_makes_room(tmp_path):
    world = World(tmp_path)
    models = world.models

    async def play():
        for name in ("m1", "m5", "m2"):
            await models.load(name)
        await models.load("m1")  # used again
        await models.load("m4")  # 40 with 80 in use: m5 goes, m2 need not
        assert sorted(k.name for k in models.loaded) == ["m1", "m2", "m4"]
        five = await models.lease("m5")  # 50 with 70 in use: m2 was used longest ago
        assert {k.name for k in models.loaded} == {"m1", "m4", "m5"}
        six = models.find("m6")
        with pytest.raises(ApiError) as error:  # m1 and m4 go, m5 may not
            await models.lease("m6")
        assert status(error) == 503 and str(six.path) not in str(error.value)
        assert [k.name for k in models.loaded] == ["m5"] and "retry-after" in error.value.headers
        models.release(five)
        await models.load("m6")
        assert [k.name for k in models.loaded] == ["m6"] and world.used == 60

    asyncio.run(play())


def test_many_requests_load_a_model_once(tmp_path):
    world = World(tmp_path)

    async def play():
        leases = await asyncio.gather(*(world.models.lease(f"m{1 + i % 3}") for i in range(30)))
        assert sorted(world.loads) == ["m1", "m2", "m3"]
        for known in leases:
            world.models.release(known)
        assert all(k.n_leases == 0 for k in world.models.all())

    asyncio.run(play())


def test_what_is_in_use_or_pinned_stays(tmp_path):
    world = World(tmp_path, most=2)
    models = world.models

    async def play():
        pinned = models.add("pin", tmp_path / "m1.gguf")
        await models.load("pin")
        busy = await models.load("m2")
        busy.service.engine.n_open = 1  # a stream that goes on
        for refused, code in ((models.unload("pin"), 409), (models.unload("m2"), 409),
                              (models.load("m3"), 503)):  # fmt: skip
            with pytest.raises(ApiError) as error:
                await refused
            assert status(error) == code
        busy.service.engine.n_open = 0
        await models.load("m3")
        assert pinned.service is not None and busy.service is None
        await models.unload("m3")
        await models.unload("m3")  # twice is no error
        assert [k.name for k in models.loaded] == ["pin"]
        assert world.used == 10

    asyncio.run(play())


def test_idle_models_are_unloaded(tmp_path, monkeypatch):
    monkeypatch.setattr("edgellm.server.models._LOOK_SECONDS", 0.01)
    world = World(tmp_path, idle_seconds=0.05)

    async def play():
        watching = asyncio.create_task(world.models.watch())
        busy, idle, never = [await world.models.load(n) for n in ("m1", "m2", "m3")]
        busy.service.engine.n_open, never.idle_seconds = 1, 1e9
        for _ in range(200):
            await asyncio.sleep(0.01)
            if idle.service is None:
                break
        assert idle.service is None and busy.service is not None and never.service is not None
        watching.cancel()

    asyncio.run(play())


def test_a_model_that_cannot_be_loaded_takes_no_others_down(tmp_path):
    world = World(tmp_path)
    world.broken = {"m2"}

    async def play():
        one = await world.models.load("m1")
        for _ in range(2):
            with pytest.raises(ApiError) as error:
                await world.models.load("m2")
            assert status(error) == 503 and "it is broken" in str(error.value)
        assert one.service.engine.is_alive and world.models.find("m2").state == "unloaded"
        world.broken.clear()
        await world.models.load("m2")
        one.service.engine.is_alive = False  # its engine has failed: the next request has another
        again = await world.models.load("m1")
        assert again.service.engine.is_alive and world.loads == ["m1", "m2", "m1"]
        assert world.used == 30

    asyncio.run(play())


def test_a_draining_server_loads_nothing(tmp_path):
    world = World(tmp_path)

    async def play():
        await world.models.load("m1")
        await world.models.close(1.0)
        with pytest.raises(ApiError) as error:
            await world.models.load("m2")
        assert status(error) == 503

    asyncio.run(play())


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["lease", "release", "open", "end", "unload", "die", "break", "mend"]),
        st.integers(1, 6),
    ),
    max_size=60,
)


@settings(max_examples=100, deadline=None)
@given(operations=OPERATIONS, most=st.sampled_from([None, 1, 2]))
def test_any_order_of_events(tmp_path_factory, operations, most):
    """Leases count; memory is as the loaded models say; nothing in use is ever unloaded."""
    world = World(tmp_path_factory.mktemp("models"), most=most)
    models, leases = world.models, {k: 0 for k in range(1, 7)}

    async def play():
        for what, k in operations:
            known: Known = models.find(f"m{k}")
            in_use = {m.name: m.service for m in models.loaded if m.is_in_use and not m.is_dead}
            with contextlib.suppress(ApiError):
                if what == "lease":
                    await models.lease(known.name)
                    leases[k] += 1
                    assert known.service is not None and known.service.engine.is_alive
                elif what == "release" and leases[k]:
                    models.release(known)
                    leases[k] -= 1
                elif what == "unload":
                    await models.unload(known.name)
                    assert known.service is None
                elif known.service is not None and what in ("open", "end", "die"):
                    if what == "open":
                        known.service.engine.n_open = 1
                    else:  # an engine that dies has failed its requests
                        known.service.engine.n_open = 0
                        known.service.engine.is_alive &= what != "die"
            world.broken |= {known.name} if what == "break" else set()
            world.broken -= {known.name} if what == "mend" else set()
            for name, service in in_use.items():
                assert models.find(name).service is service or what in ("end", "release", "die")
            assert [m.n_leases for m in models.all()] == [leases[k] for k in range(1, 7)]
            assert world.used == sum(m.service.engine.size for m in models.loaded)
            assert world.used <= MEMORY
            assert most is None or len(models.loaded) <= most

    asyncio.run(play())
