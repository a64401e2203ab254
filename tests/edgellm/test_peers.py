"""Rows from one GPU to the next: directly, in any order of streams, not before they are made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from on_gpus import GREEDY, PROMPTS, load, write

from edgellm import LLM
from edgellm.kernels.cuda.emulated import POLICIES, EmulatedDevice
from edgellm.kernels.cuda.program import DeviceProgram
from edgellm.offload import ALL

Gpus = Callable[..., list[EmulatedDevice]]
# the first GPU is come back to in each layer
TO_AND_FRO = {"overrides": ((r"ffn_down|attn_q", "cuda1"), (r"attn_output", "cuda0"))}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("peers"), "llama", 4)


def answers(llm: LLM) -> tuple[Any, list[list[int]]]:
    return llm.logits(PROMPTS[0]), [c.tokens for c in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("options", [{}, TO_AND_FRO])
def test_any_order_of_streams(path: Path, gpus: Gpus, policy: str, options: Any) -> None:
    gpus(1 << 24)
    with load(path, ALL) as llm:
        wanted = answers(llm)
    gpus(1 << 24, 1 << 24, policy=policy)
    with load(path, ALL, tensor_split=(1, 1), **options) as llm:
        found = answers(llm)
    assert np.array_equal(found[0], wanted[0]) and found[1] == wanted[1]


def test_only_embeddings_and_the_best_logit_cross_the_host(
    path: Path, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = gpus(1 << 24, 1 << 24)
    with load(path, ALL, tensor_split=(1, 1)) as llm:
        back = []
        for device in devices:
            real = device.copy_from

            def copy_from(buffer: Any, out: Any, stream: Any = None, real: Any = real) -> None:
                back.append(out.shape)
                real(buffer, out, stream)

            monkeypatch.setattr(device, "copy_from", copy_from)
        llm.generate(PROMPTS[0], GREEDY)
        assert back == [(1,)] * GREEDY.max_tokens  # type: ignore[operator]


def test_a_missing_wait_shows(path: Path, gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are taken before they are made."""
    gpus(1 << 24)
    with load(path, ALL) as llm:
        wanted = llm.logits(PROMPTS[0])
    real = DeviceProgram._fetch

    def fetch(self: DeviceProgram, *given: Any) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(self.stream, "wait", lambda event: None)
            real(self, *given)

    monkeypatch.setattr(DeviceProgram, "_fetch", fetch)
    caught = set()
    for policy in POLICIES:
        gpus(1 << 24, 1 << 24, policy=policy)
        with load(path, ALL, tensor_split=(1, 1), **TO_AND_FRO) as llm:
            if not np.array_equal(llm.logits(PROMPTS[0]), wanted):
                caught.add(policy)
    assert "lazy" in caught and "eager" not in caught
