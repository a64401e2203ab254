"""Guessing beside a GPU: the tokens stay, wherever layers and the draft model are, and what happens
to the draft model there is said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgellm import LLM, SamplingParams
from edgellm.errors import EdgeLLMError
from edgellm.kernels.cuda.device import DeviceError
from edgellm.kernels.cuda.emulated import EmulatedDevice
from edgellm.offload import ALL, Options
from edgellm.speculative import build
from edgellm.speculative.cores import Division, Share
from edgellm.speculative.options import SpeculationOptions

Gpus = Callable[..., list[EmulatedDevice]]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.8, seed=3)
PROMPTS = [[5, 6, 7, 8, 9, 10] * 4, [3]]
PLACES: dict[str, dict[str, Any]] = {
    "all": {"n_gpu_layers": ALL},
    "streamed": {"n_gpu_layers": ALL, "stream": "on"},
    "strict": {"n_gpu_layers": ALL, "strict": True},
    "half": {"n_gpu_layers": 3},
    "two": {"n_gpu_layers": ALL, "tensor_split": (1.0, 1.0)},
}


@pytest.fixture
def path(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama", n_layers=4, n_ff=512)


@pytest.fixture
def draft(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama", n_layers=1)


def load(path: Path, speculation: SpeculationOptions | None = None, **options: Any) -> LLM:
    own = {"fit_margin": 0, "stream": "off"} | options
    return LLM(
        path, n_ctx=256, n_threads=1, max_num_seqs=3, cache_tokens=768, offload=Options(**own),
        speculation=speculation,
    )  # fmt: skip


def answers(llm: LLM) -> list[list[int]]:
    alone = [llm.generate(p, params).tokens for p in PROMPTS for params in (GREEDY, SAMPLED)]
    return alone + [c.tokens for c in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("place", PLACES)
def test_tokens_are_those_of_the_placement(
    path: Path, draft: Path, gpus: Gpus, eager: None, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgellm.kernels.cuda.weights._PIECE_BYTES", 1 << 12)
    totals = [1 << 24] * 2
    if place == "streamed":
        gpus(1 << 24)
        with load(path, n_gpu_layers=ALL) as llm:
            taken = llm.placement.plan.taken["cuda0"]
        totals = [taken.total - taken.weights // 8]
    gpus(*totals, policy="random")
    with load(path, **PLACES[place]) as llm:
        assert bool(llm.placement.plan.streamed) == (place == "streamed")
        expected = answers(llm)
    options = [SpeculationOptions("lookup")]
    on_gpu = [] if place == "streamed" else [(draft, ALL)]  # where there is room for it
    for model, n in [(path, 0), *on_gpu]:
        options.append(SpeculationOptions("draft", model=str(model), n_gpu_layers=n))
    in_turns = Division(Share(1), Share(1), False)  # an emulated GPU is one thread's
    monkeypatch.setattr(build, "divide", lambda *given: in_turns)
    for speculation in options:
        devices = gpus(*totals, policy="random")
        with load(path, speculation, **PLACES[place]) as llm:
            assert answers(llm) == expected
            counts = llm.metrics.speculation
            assert (counts.drafted_tokens > 5 or speculation.kind == "lookup") and llm.is_idle
        assert not any(d.used or d.pinned_used for d in devices)


def test_a_draft_model_that_cannot_be_leaves_nothing_behind(
    path: Path, draft: Path, tiny_model: Callable[..., Path], gpus: Gpus,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    other = tiny_model("llama", controls=("<|more|>",))
    (device,) = gpus(1 << 24)
    kept = []  # a traceback keeps what it went through
    with pytest.raises(EdgeLLMError) as refused:
        load(
            path, SpeculationOptions("draft", model=str(other), n_gpu_layers=ALL), n_gpu_layers=ALL
        )
    kept.append(refused)
    assert device.used == 0

    def fail(*given: Any) -> None:
        raise DeviceError("cuda0 failed.")

    monkeypatch.setattr("edgellm.speculative.drafter.Drafter.measure", fail)
    with pytest.raises(DeviceError) as failed:
        load(path, SpeculationOptions("draft", model=str(draft), n_gpu_layers=ALL))
    kept.append(failed)
    assert device.used == 0


@pytest.mark.parametrize("is_apart", [False, True])
def test_a_gpu_that_fails_under_the_draft_model_ends_the_model(
    path: Path, draft: Path, gpus: Gpus, eager: None, is_apart: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    division = Division(Share(1), Share(1, (0,)), True)
    if is_apart:
        monkeypatch.setattr(build, "divide", lambda *given: division)
    gpus(1 << 24)
    speculation = SpeculationOptions("draft", model=str(draft), n_gpu_layers=ALL)
    with load(path, speculation, n_gpu_layers=0) as llm:
        assert llm.is_alive and not llm.lost_device and llm.speculation is not None
        proposer: Any = llm.speculation.proposers[0]

        def fail(*given: Any) -> None:
            raise DeviceError("cuda0 failed: illegal address.")

        monkeypatch.setattr(proposer.drafter.llm.runner.devices["cuda0"], "_pass", fail)
        with pytest.raises(DeviceError, match="illegal address"):
            for _ in range(100):  # a writer ahead is not waited for
                llm.generate(PROMPTS[0], GREEDY)
        assert not llm.is_alive and llm.lost_device == "emulated GPU"


def test_what_becomes_of_a_draft_models_layers_is_said(path: Path, draft: Path, gpus: Gpus) -> None:
    speculation = SpeculationOptions("draft", model=str(draft), n_gpu_layers=ALL)
    (device,) = gpus(1 << 24)
    with load(path, speculation, n_gpu_layers=0) as llm:
        assert device.used and not [n for n in llm.notices if "layers" in n]
    # what the target leaves free by --fit-margin is not the draft model's either
    (device,) = gpus(1 << 24)
    with load(path, speculation, n_gpu_layers=0, fit_margin=1 << 24) as llm:
        assert not device.used
        words = "Of the draft model: 2 layers do not fit into the GPU's memory"
        assert any(note.startswith(words) for note in llm.notices)


def test_a_draft_model_on_a_gpu_that_is_not_there(
    path: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGELLM_DEVICE", "cpu")
    speculation = SpeculationOptions("draft", model=str(draft), n_gpu_layers=ALL)
    with pytest.raises(EdgeLLMError, match=r"^Draft model \(-md, -ngld\): No layer can go to"):
        load(path, speculation)


@pytest.mark.parametrize(
    ("options", "is_on_gpu"),
    [({}, True), ({"kv_offload": False}, False), ({"overrides": (("ffn_down", "cpu"),)}, False)],
)
def test_a_target_that_needs_the_cores_keeps_them(
    path: Path, draft: Path, gpus: Gpus, options: dict[str, Any], is_on_gpu: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A target on the GPU leaves cores to the draft model; not one whose experts, or keys and
    values, are the CPU's."""
    asked, real = [], build.divide

    def divide(cores: Any, target: Any, is_asked: bool, on_gpu: bool, *more: Any) -> Division:
        asked.append(on_gpu)
        return real(cores, target, is_asked, on_gpu, *more)

    monkeypatch.setattr(build, "divide", divide)
    gpus(1 << 24)
    speculation = SpeculationOptions("draft", model=str(draft), n_gpu_layers=0)
    with load(path, speculation, n_gpu_layers=ALL, **options):
        assert asked == [False, is_on_gpu]  # where it goes is not known before it is loaded
