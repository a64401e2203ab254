"""Whole tiny models with layers on emulated GPUs: the CPU's text, in the memory planned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import architectures
import numpy as np
import pytest
from on_gpus import GREEDY, NAMES, PROMPTS, Make, expected, is_close, load, margins

from edgellm import LLM
from edgellm.errors import EdgeLLMError
from edgellm.kernels.cuda.device import DeviceError
from edgellm.kernels.cuda.emulated import POLICIES, EmulatedDevice
from edgellm.kernels.cuda.fuse import Fused
from edgellm.offload import ALL
from edgellm.request_options import RequestOptions
from edgellm.runner import Run
from edgellm.steps import Steps


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Make:
    folder = tmp_path_factory.mktemp("offload")

    def make(name: str, **keys: Any) -> Path:
        path = folder / f"{name}-{len(keys)}.gguf"
        return path if path.exists() else architectures.write(path, name, **keys)

    return make


@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_layers_answers_as_the_cpu_does(
    model: Make, gpus: Callable[..., list[EmulatedDevice]], name: str
) -> None:
    path = model(name)
    logits, texts = expected(path)
    for n in (ALL, 2, 1):
        (device,) = gpus(1 << 24)
        with load(path, n) as llm:
            assert llm.placement.plan.n_gpu_layers == min(n, 3)
            assert device.used <= llm.placement.plan.taken["cuda0"].total
            assert is_close(llm.logits(PROMPTS[0]), logits)
            for prompt, wanted, answer in zip(
                PROMPTS, texts, llm.generate(PROMPTS, GREEDY), strict=True
            ):
                differ = [i for i, t in enumerate(wanted) if answer.tokens[i] != t]
                if differ:  # only where two tokens were nearly as good
                    at = margins(path, prompt, wanted)[differ[0]]
                    assert at < 0.05 * np.abs(logits).max()
        assert device.used == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_order_of_streams_changes_nothing(
    model: Make, gpus: Callable[..., list[EmulatedDevice]], policy: str
) -> None:
    path, found = model("gemma3"), []
    for p in (policy, "eager"):
        gpus(1 << 24, 1 << 24, policy=p)
        with load(path, ALL, tensor_split=(1, 1)) as llm:
            assert set(llm.placement.plan.places) == {"cuda0", "cuda1"}
            found.append(
                (llm.logits(PROMPTS[0]), [c.tokens for c in llm.generate(PROMPTS, GREEDY)])
            )
    assert np.array_equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


def test_generated_tokens_go_through_captured_graphs(
    model: Make, gpus: Callable[..., list[EmulatedDevice]]
) -> None:
    """A graph that is captured in one step and replayed in others computes what launches do."""
    path = model("llama")
    (device,) = gpus(1 << 24)
    with load(path, ALL) as llm:
        first = llm.generate(PROMPTS, GREEDY)
        program = llm.runner.devices["cuda0"]
        assert any(graph is not None for graph in program._captured.values())
        llm.generate(PROMPTS[0], GREEDY)  # steps of one row: launched once, then captured
        before = device.n_launches
        again = llm.generate(PROMPTS[0], GREEDY)
        launched = device.n_launches - before
        assert again.tokens == first[0].tokens
        # a token of the prompt is launched; all of the 11 steps are replayed
        assert launched < 2 * len(program.ops)


def test_a_row_is_the_same_in_any_company_and_chunks(
    model: Make, gpus: Callable[..., list[EmulatedDevice]]
) -> None:
    path = model("qwen3moe")
    gpus(1 << 24)
    with load(path, 2, prefix_cache=False) as llm:
        together = [c.tokens for c in llm.generate(PROMPTS, GREEDY)]
        assert together == [llm.generate(p, GREEDY).tokens for p in PROMPTS]
        whole = llm.logits(PROMPTS[0])
        sequence = llm.sequence(PROMPTS[0], GREEDY)
        runner = llm.runner
        assert runner.cache.admit(sequence, reuse=False)
        pieces = [runner.forward([Run(sequence, n, "all")]).copy() for n in (1, 30, 7, 29)]
        runner.cache.release(sequence)
        assert np.array_equal(np.concatenate(pieces), whole)


def test_prefixes_forks_and_saved_caches_work_on_the_device(
    model: Make, gpus: Callable[..., list[EmulatedDevice]], tmp_path: Path
) -> None:
    path = model("gemma3")
    gpus(1 << 24)
    with load(path, 2) as llm:
        fresh = llm.generate(PROMPTS[0], GREEDY, RequestOptions(cache_salt="a"))
        llm.generate(PROMPTS[0], GREEDY)
        other = [*PROMPTS[0][:50], 1, 2, 3]  # parts in the middle of a block: it is copied
        hit = llm.generate(other, GREEDY)
        assert hit.n_cached == 50
        again = llm.generate(PROMPTS[0], GREEDY)
        assert again.n_cached == len(PROMPTS[0]) - 1 and again.tokens == fresh.tokens
        assert llm.save_cache(tmp_path / "kv", PROMPTS[0]) == len(PROMPTS[0])
    gpus(1 << 24)
    with load(path, 2) as llm:
        assert llm.load_cache(tmp_path / "kv") == len(PROMPTS[0])
        restored = llm.generate(PROMPTS[0], GREEDY)
        assert restored.n_cached == len(PROMPTS[0]) - 1 and restored.tokens == fresh.tokens
    with load(path, 0) as llm, pytest.raises(EdgeLLMError):
        llm.load_cache(tmp_path / "kv")  # the bytes mean something else on the CPU


@pytest.mark.parametrize("types", [("q8_0", "q4_0"), ("f32", "q8_0")])
def test_types_of_keys_and_values(
    model: Make, gpus: Callable[..., list[EmulatedDevice]], types: tuple[str, str]
) -> None:
    path, (k, v) = (
        model("llama", **{"attention.key_length": 32, "attention.value_length": 32}),
        types,
    )
    with load(path, 0, type_k=k, type_v=v) as llm:
        wanted = llm.logits(PROMPTS[0])
    gpus(1 << 24)
    with load(path, ALL, type_k=k, type_v=v) as llm:
        assert is_close(llm.logits(PROMPTS[0]), wanted)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3moe", {"n_cpu_moe": 2}),
        ("qwen3moe", {"n_cpu_moe": 1}),
        ("llama", {"kv_offload": False}),
        ("llama", {"overrides": (("ffn_down", "cpu"), (r"blk\.0\.attn_[qk]", "cpu"))}),
        ("gemma3", {"overrides": ((r"blk\.0\.", "cpu"), (r"output|token_embd", "cpu"))}),
    ],
)
def test_parts_of_layers_on_the_cpu(
    model: Make, gpus: Callable[..., list[EmulatedDevice]], name: str, options: dict[str, Any]
) -> None:
    path = model(name)
    logits, texts = expected(path)
    gpus(1 << 24)
    with load(path, ALL, **options) as llm:
        assert is_close(llm.logits(PROMPTS[0]), logits)
        assert [c.tokens for c in llm.generate(PROMPTS, GREEDY)] == texts


@pytest.mark.parametrize("name", ("llama-moe", "gemma3"))
def test_small_memories_are_filled_and_never_exceeded(
    model: Make, gpus: Callable[..., list[EmulatedDevice]], name: str
) -> None:
    """From too small for anything to large enough for all."""
    path = model(name)
    logits, _ = expected(path)
    numbers = []
    for kib in (64, 900, 1300, 1700, 2500, 8000):
        (device,) = gpus(kib << 10)
        with load(path) as llm:
            plan = llm.placement.plan
            numbers.append(plan.n_gpu_layers)
            if plan.uses_device:
                assert device.used <= plan.taken["cuda0"].total <= kib << 10
            assert is_close(llm.logits(PROMPTS[0][:20]), logits[:20])
    assert numbers == sorted(numbers) and numbers[0] == 0 and numbers[-1] == 3


def test_memory_that_turns_out_short_is_planned_again(
    model: Make, gpus: Callable[..., list[EmulatedDevice]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program takes memory between plan and loading."""
    path = model("llama")
    (device,) = gpus(1 << 24)
    real, taken = device.alloc, []

    def alloc(n_bytes: int) -> Any:
        if not taken:
            taken.append(real((1 << 24) - (1 << 20)))
        return real(n_bytes)

    monkeypatch.setattr(device, "alloc", alloc)
    with load(path, ALL) as llm:
        assert llm.placement.plan.n_gpu_layers < 3
        assert any("is out of memory" in note for note in llm.notices)
        assert len(llm.generate(PROMPTS[0], GREEDY).tokens) == 12


def test_what_cannot_be_is_said(
    model: Make, gpus: Callable[..., list[EmulatedDevice]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model("llama")
    with pytest.raises(EdgeLLMError, match="n_gpu_layers must be a number of at least 0"):
        LLM(path, n_gpu_layers=-3)
    monkeypatch.setenv("EDGELLM_DEVICE", "cpu")
    with pytest.raises(EdgeLLMError, match=r"No layer can go to a GPU \(--ngl\). No GPU is used"):
        LLM(path, n_gpu_layers=3)
    with LLM(path, n_ctx=256) as llm:
        assert not llm.placement.plan.uses_device and llm.notices == []
    monkeypatch.setenv("EDGELLM_DEVICE", "abacus")
    with pytest.raises(EdgeLLMError, match="it can be cpu, emulated or emulated:SIZE"):
        LLM(path)
    gpus(1 << 24)
    with load(path, ALL) as llm:
        with pytest.raises(EdgeLLMError, match="load the model with --ngl 0"):
            llm.on("output", lambda rows: None)
        said = llm.placement_report()
        assert said[0].startswith("layers 0-1 on cuda0 (emulated GPU): ")
        assert said[1].startswith("output on cuda0 (emulated GPU): ")
        assert said[2].startswith("cuda0 (emulated GPU): weights ")
    with load(path, ALL, block_size=16) as llm:
        assert "blocks of 16 tokens have no GPU kernel" in llm.notices[0]


def test_ctrl_c_in_mid_step_leaves_the_device_at_rest(
    model: Make, gpus: Callable[..., list[EmulatedDevice]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was launched must not run within the next step, with its numbers."""
    gpus(1 << 24)
    with load(model("llama"), ALL) as llm:
        rights = [c.tokens for c in llm.generate(PROMPTS, GREEDY)]
        program = llm.runner.devices["cuda0"]
        launch, left = program._pass, list[int]()

        def interrupt(part: Any, s: Any) -> None:
            launch(part, s)
            left.append(len(program.stream.queue))
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(program, "_pass", interrupt)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS, GREEDY)
        assert min(left) > 0 and not program.stream.queue and not llm.runner.lost_device
        assert [llm.generate(p, GREEDY).tokens for p in PROMPTS] == rights


def test_benchmarks_time_the_kernels_of_each_phase(
    model: Make, gpus: Callable[..., list[EmulatedDevice]]
) -> None:
    gpus(1 << 24)
    with load(model("llama"), ALL) as llm:
        numbers, steps = llm.runner.devices["cuda0"].numbers, Steps(llm)
        sequence = steps.open(16)
        for _ in range(2):
            steps.prefill(sequence, 8)
            assert [p.phase for p in numbers.passes] == ["prefill"]
            steps.decode([sequence])
            assert [p.phase for p in numbers.passes] == ["decode"]
            assert steps.cut(sequence, 4)
        steps.release(sequence)


def test_a_device_that_fails_ends_the_requests_and_the_model(
    model: Make, gpus: Callable[..., list[EmulatedDevice]], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(1 << 24)
    with load(model("llama"), 2) as llm:
        assert llm.is_alive
        program = llm.runner.devices["cuda0"]

        def fail(*given: Any) -> None:
            raise DeviceError("cuda0 failed: illegal address.")

        monkeypatch.setattr(program, "_pass", fail)
        with pytest.raises(DeviceError, match="illegal address"):
            llm.generate(PROMPTS[0], GREEDY)
        assert not llm.is_alive


@pytest.mark.parametrize("name", ("llama", "gemma3", "gpt-oss", "deepseek2"))
def test_ops_launched_together_have_the_bits_of_one_by_one(
    model: Make, gpus: Callable[..., list[EmulatedDevice]], name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path, found, launches = model(name), [], []
    for is_fused in (True, False):
        if not is_fused:
            for module in ("program", "workspace"):
                monkeypatch.setattr(f"edgellm.kernels.cuda.{module}.fuse", lambda parts: Fused())
        (device,) = gpus(1 << 24)
        with load(path, ALL) as llm:
            found.append(
                (llm.logits(PROMPTS[0]), [c.tokens for c in llm.generate(PROMPTS, GREEDY)])
            )
            launches.append(device.n_launches)
    assert np.array_equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]
    assert launches[0] < 0.9 * launches[1]


def test_flags_about_experts_of_a_model_without_them(model: Make) -> None:
    with load(model("llama"), 0, n_cpu_moe=3) as llm:
        assert llm.notices == [
            "The model has no experts that could stay on the CPU (--cpu-moe, --n-cpu-moe)."
        ]
