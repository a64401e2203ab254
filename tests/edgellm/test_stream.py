"""Layers whose weights come to the GPU for each step: the bits of weights that stay, in any order
of streams, and in no more memory than was planned."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import on_gpus
import pytest
from on_gpus import GREEDY, NAMES, PROMPTS, expected, is_close, margins, write

from edgellm import LLM
from edgellm.errors import EdgeLLMError
from edgellm.kernels.cuda.emulated import POLICIES, EmulatedDevice, EmulatedEvent, EmulatedStream
from edgellm.kernels.cuda.staging import Staging
from edgellm.offload import ALL, Taken

N_LAYERS = 4
Gpus = Callable[..., list[EmulatedDevice]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stream")


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that weights are most of what tiny models take, and come in pieces."""
    monkeypatch.setattr("edgellm.kernels.cuda.weights._PIECE_BYTES", 1 << 12)
    for name in ("STEP_TOKENS", "LOGITS_TOKENS"):
        monkeypatch.setattr(f"edgellm.llm.{name}", 16)


def load(path: Path, n: int | None = None, **options: Any) -> LLM:
    """With a cache that must not shrink."""
    return on_gpus.load(path, n, cache_tokens=1024, **options)


def answers(llm: LLM) -> tuple[Any, list[list[int]]]:
    return llm.logits(PROMPTS[0]), [c.tokens for c in llm.generate(PROMPTS, GREEDY)]


def whole(path: Path, gpus: Gpus) -> tuple[Taken, Any, list[list[int]]]:
    """What a GPU with room for all takes, and its answers."""
    gpus(1 << 24)
    with load(path, ALL) as llm:
        return llm.placement.plan.taken["cuda0"], *answers(llm)


@pytest.mark.parametrize("name", NAMES)
def test_a_streamed_model_has_the_bits_of_one_that_stays(
    folder: Path, gpus: Gpus, name: str
) -> None:
    path = write(folder, name, N_LAYERS)
    taken, logits, texts = whole(path, gpus)
    cpu_logits, cpu_texts = expected(path)
    layer, numbers = taken.weights // N_LAYERS, []
    for total in (taken.total - layer // 8, taken.total - int(1.5 * layer)):
        (device,) = gpus(total)
        with load(path, ALL, stream="on") as llm:
            plan = llm.placement.plan
            assert plan.n_gpu_layers == N_LAYERS + 1
            assert device.used <= plan.taken["cuda0"].total <= total
            numbers.append(len(plan.taken["cuda0"].streamed))
            found, said = answers(llm)
            assert np.array_equal(found, logits) and said == texts
            program = llm.runner.devices["cuda0"]
            assert len({key[0] for key, graph in program._captured.items() if graph}) > 2
        assert device.used == 0
    assert 2 < numbers[0] <= numbers[1]
    assert is_close(logits, cpu_logits)
    for prompt, wanted, text in zip(PROMPTS, cpu_texts, texts, strict=True):
        differ = [i for i, t in enumerate(wanted) if text[i] != t]
        if differ:  # only where two tokens were nearly as good
            at = margins(path, prompt, wanted)[differ[0]]
            assert at < 0.05 * np.abs(cpu_logits).max()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("options", [{}, {"kv_offload": False}, {"n_cpu_moe": 1}])
def test_order_of_streams_changes_nothing(
    folder: Path, gpus: Gpus, policy: str, options: dict[str, Any]
) -> None:
    path = write(folder, "qwen3moe", N_LAYERS)
    gpus(1 << 24)
    with load(path, ALL, **options) as llm:
        taken, wanted = llm.placement.plan.taken["cuda0"], answers(llm)
    gpus(taken.total - taken.weights // 3, policy=policy)
    with load(path, ALL, stream="on", **options) as llm:
        assert llm.placement.plan.streamed and llm.placement.plan.n_gpu_layers == N_LAYERS + 1
        found = answers(llm)
    assert np.array_equal(found[0], wanted[0]) and found[1] == wanted[1]


def test_two_gpus_of_which_the_first_streams(folder: Path, gpus: Gpus) -> None:
    path = write(folder, "llama-moe", N_LAYERS)
    taken, logits, texts = whole(path, gpus)
    devices = gpus(taken.total - taken.weights // 3, taken.workspace + taken.weights // 4)
    with load(path, ALL, stream="on") as llm:
        plan = llm.placement.plan
        assert plan.taken["cuda0"].streamed and not plan.taken["cuda1"].streamed
        assert all(d.used <= plan.taken[n].total for n, d in llm.placement.used.items())
        found, said = answers(llm)
    assert np.array_equal(found, logits) and said == texts
    assert [d.used for d in devices] == [0, 0]


class _Now(EmulatedEvent):
    """An event that nobody has to wait for."""

    def synchronize(self) -> None: ...


@pytest.fixture(params=["copied", "read"])
def hazard(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A guard of the slots is missing: that their weights have come, or that they were read."""

    def record(stream: EmulatedStream) -> EmulatedEvent:
        is_copy = stream is not stream.device.main
        event = _Now if is_copy == (request.param == "copied") else EmulatedEvent
        return event(stream, stream.end)

    monkeypatch.setattr(EmulatedStream, "record", record)
    yield request.param


def test_a_missing_wait_shows(folder: Path, gpus: Gpus, hazard: str) -> None:
    path = write(folder, "llama", N_LAYERS)
    taken, logits, _ = whole(path, gpus)
    caught = set()
    for policy in POLICIES:
        gpus(taken.total - taken.weights // 3, policy=policy)
        with load(path, ALL, stream="on") as llm:
            if not np.array_equal(llm.logits(PROMPTS[0]), logits):
                caught.add(policy)
    assert {"copied": "lazy", "read": "eager-side"}[hazard] in caught and "eager" not in caught


def test_an_interrupted_step_is_followed_by_right_ones(
    folder: Path, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(folder, "llama", N_LAYERS)
    taken, logits, texts = whole(path, gpus)
    gpus(taken.total - taken.weights // 3)
    with load(path, ALL, stream="on") as llm:
        n_left, real = 3, Staging.leave

        def leave(staging: Staging, section: Any, stream: Any) -> None:
            nonlocal n_left
            n_left -= 1
            if not n_left:
                raise KeyboardInterrupt
            real(staging, section, stream)

        with monkeypatch.context() as patched:
            patched.setattr(Staging, "leave", leave)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS, GREEDY)
        found, said = answers(llm)
    assert np.array_equal(found, logits) and said == texts


def test_a_copy_that_was_interrupted_is_made_again(
    folder: Path, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slot holds weights that nobody has noted down."""
    path = write(folder, "llama", N_LAYERS)
    taken, logits, _ = whole(path, gpus)
    (device,) = gpus(taken.total - taken.weights // 3)
    with load(path, ALL, stream="on") as llm:
        staging, real = llm.runner.devices["cuda0"].staging, device.copy_to

        def copy_to(buffer: Any, array: Any, stream: Any = None) -> None:
            real(buffer, array, stream)
            if stream is staging._stream:  # in the place of what the next step begins with
                raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(device, "copy_to", copy_to)
            with pytest.raises(KeyboardInterrupt):
                llm.logits(PROMPTS[0][:16])
        assert np.array_equal(llm.logits(PROMPTS[0]), logits)


def test_memory_of_the_host_is_given_back_with_the_model(folder: Path, gpus: Gpus) -> None:
    """At once: a model that takes its place needs it."""
    path = write(folder, "llama", N_LAYERS)
    taken, _, _ = whole(path, gpus)
    (device,) = gpus(taken.total - taken.weights // 3)
    gc.disable()
    try:
        with load(path, ALL, stream="on") as llm:
            streamed = sum(llm.placement.plan.taken["cuda0"].streamed.values())
            assert 0 < streamed < device.pinned_used
        assert (device.used, device.pinned_used) == (0, 0)
    finally:
        gc.enable()


def test_a_host_that_pins_no_more_streams_nothing(folder: Path, gpus: Gpus) -> None:
    path = write(folder, "llama", N_LAYERS)
    taken, logits, _ = whole(path, gpus)
    (device,) = gpus(taken.total - taken.weights // 3)
    with load(path, ALL, stream="on") as llm:
        streamed = sum(llm.placement.plan.taken["cuda0"].streamed.values())
        needed = device.pinned_used
    (device,) = gpus(taken.total - taken.weights // 3)
    device.pinned_total = needed - streamed // 2
    with load(path, ALL, stream="on") as llm:
        plan = llm.placement.plan
        assert not plan.streamed and 0 < plan.n_gpu_layers < N_LAYERS + 1
        assert "No layer is streamed (--stream-layers)." in llm.notices[0]
        assert is_close(llm.logits(PROMPTS[0]), logits)
    assert device.used == 0


def test_the_forecast_decides_unless_told(
    folder: Path, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgellm.speeds import Speed, Speeds

    path = write(folder, "llama", N_LAYERS)
    taken, _, _ = whole(path, gpus)
    for cpu, copy, streams in ((1e9, 1e10, True), (1e11, 1e9, False)):
        speeds = Speeds({"cpu": Speed(cpu, 1e13), "cuda0": Speed(1e12, 1e13, copy, 1e-6)})
        monkeypatch.setattr("edgellm.speeds.measure", lambda devices, n, speeds=speeds: speeds)
        gpus(taken.total - taken.weights // 3)
        with load(path, stream="auto") as llm:
            assert bool(llm.placement.plan.streamed) == streams
            said = " ".join(llm.placement_report())
            assert ("copied for each step" in said) == streams == ("--stream-layers" in said)
    gpus(1 << 24)
    with load(path, stream="auto") as llm:  # nothing is left over: nothing is measured
        assert not llm.placement.plan.streamed
    with pytest.raises(EdgeLLMError, match="--stream-layers on.* needs a GPU. --ngl 0 uses none"):
        load(path, 0, stream="on")
