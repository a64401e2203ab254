"""Where a GPU makes the logits, steps that look at the best alone leave the others there: the
tokens are those of whole logits, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from on_gpus import GREEDY, PROMPTS, load, write

from edgellm import LLM, SamplingParams
from edgellm.errors import EdgeLLMError
from edgellm.kernels.cuda.emulated import EmulatedDevice
from edgellm.offload import ALL
from edgellm.quant.gguf import GGUF
from edgellm.runner import Run
from edgellm.sampling import largest
from edgellm.sequence import Sequence

TOP_K = SamplingParams(max_tokens=12, temperature=0.9, top_k=40, seed=5, ignore_eos=True)
Gpus = Callable[..., list[EmulatedDevice]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("candidates")


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many logits of a row were copied in each step; 0: all of them."""
    from edgellm.kernels.cuda.program import DeviceProgram

    run, found = DeviceProgram._run, list[int]()

    def spy(self: Any, part: Any, rows: Any) -> None:
        if part.logits is not None and len(rows(part.logits)):
            found.append(self._n_best)
        run(self, part, rows)

    monkeypatch.setattr(DeviceProgram, "_run", spy)
    return found


PLACES: list[dict[str, Any]] = [
    {},
    {"tensor_split": (1, 1)},
    {"overrides": ((r"blk\.", "cpu"),)},  # the output matrix alone
]


@pytest.mark.parametrize("params", [GREEDY, TOP_K], ids=["greedy", "top_k"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3moe"])
def test_tokens_are_those_of_whole_logits_and_of_the_cpu(
    folder: Path, gpus: Gpus, widths: list[int], monkeypatch: pytest.MonkeyPatch, name: str,
    params: SamplingParams,
) -> None:  # fmt: skip
    path = write(folder, name)
    with load(path, 0) as llm:
        wanted = [c.tokens for c in llm.generate(PROMPTS, params)]
    for where in PLACES:
        gpus(1 << 24, 1 << 24)
        with load(path, ALL, **where) as llm:
            found = [c.tokens for c in llm.generate(PROMPTS, params)]
            assert set(widths) == {1 if params is GREEDY else 64}, where
            alone = [llm.generate(p, params).tokens for p in PROMPTS]  # captured, then repeated
        with monkeypatch.context() as patched, load(path, ALL, **where) as llm:
            patched.setattr("edgellm.loop._n_best", lambda runs: 0)
            widths.clear()
            whole = [c.tokens for c in llm.generate(PROMPTS, params)]
            assert set(widths) == {0}
        widths.clear()
        assert found == alone == whole == wanted, where


MIXED = [
    GREEDY,
    TOP_K,
    replace(TOP_K, top_k=3, top_p=1.0, min_p=0.0, seed=6),
    replace(TOP_K, typical_p=0.7, xtc_probability=0.5, seed=7),
]


@pytest.mark.parametrize(
    ("others", "width"),
    [
        ([], 64),
        ([replace(GREEDY, logprobs=2)], 0),
        ([replace(GREEDY, repeat_penalty=1.3)], 0),
        ([replace(TOP_K, logit_bias={5: 1.0})], 0),
        ([replace(TOP_K, top_k=0)], 0),
        ([replace(TOP_K, top_k=65)], 0),
        ([replace(TOP_K, prompt_logprobs=1, max_tokens=0)], 0),
    ],
)
def test_one_who_needs_whole_logits_brings_them_for_all(
    folder: Path, gpus: Gpus, widths: list[int], others: list[SamplingParams], width: int
) -> None:
    """Requests that ask for different things in one step; each gets what it gets alone."""
    gpus(1 << 24)
    asked = [*MIXED[: 4 - len(others)], *others]
    with load(write(folder, "llama"), ALL) as llm:
        sequences = [s for p, prompt in zip(asked, [*PROMPTS, [3, 4, 5]], strict=True)
                     for s in llm.submit(prompt, p)]  # fmt: skip
        widths.clear()
        llm.step()
        assert widths == [width]
        while not all(s.finish_reason for s in sequences):
            llm.step()
        together = [(s.output, s.scores) for s in sequences]
        for sequence, params, (tokens, scores) in zip(sequences, asked, together, strict=True):
            prompt = sequence.tokens[: sequence.n_prompt]
            (again,) = llm.submit(prompt, params)
            while not again.finish_reason:
                llm.step()
            assert (again.output, again.scores) == (tokens, scores)
            assert sequence.error is None


def admitted(llm: LLM) -> Iterator[Sequence]:
    """A prompt that is read in part, one that is read, and one whose last tokens count as
    generated, as if a draft were checked."""
    for prompt, n_computed in zip(PROMPTS, (30, 19, 30), strict=True):
        sequence = llm.sequence(prompt, GREEDY)
        assert llm.runner.cache.admit(sequence, reuse=False)
        llm.runner.forward([Run(sequence, n_computed, "none")])
        yield sequence
    sequence.n_prompt = sequence.n_computed


@pytest.mark.parametrize("k", [1, 40])
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1)])
def test_rows_of_prompts_and_several_rows_of_a_sequence(
    folder: Path, gpus: Gpus, k: int, order: tuple[int, ...]
) -> None:
    """A device has the rows of generated tokens first, and goes through phases one by one."""
    gpus(1 << 24)
    found: list[Any] = []
    with load(write(folder, "llama"), ALL) as llm:
        for is_best in (True, False):
            sequences = list(admitted(llm))
            runs = [Run(sequences[i], *[(9, "last"), (1, "last"), (6, "all")][i]) for i in order]
            found.append(llm.runner.best(runs, k) if is_best else llm.runner.forward(runs))
            for sequence in sequences:
                llm.runner.cache.release(sequence)
    assert len(found[0]) == len(found[1]) == 8
    for candidates, row in zip(*found, strict=True):
        ids = largest(row, k)
        assert candidates.ids is not None and candidates.ordered
        assert np.array_equal(candidates.ids[:k], ids)
        assert np.array_equal(candidates.logits[:k], row[ids])


def test_a_step_copies_a_few_bytes_and_launches_nothing_by_itself(
    folder: Path, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    (device,) = gpus(1 << 24)
    copied, real = list[int](), device.copy_from

    def copy_from(buffer: Any, out: Any, stream: Any = None) -> None:
        copied.append(out.nbytes)
        real(buffer, out, stream)

    monkeypatch.setattr(device, "copy_from", copy_from)
    with load(write(folder, "llama"), ALL) as llm:
        for params, n_bytes in ((GREEDY, 8), (TOP_K, 64 * 8), (replace(TOP_K, logprobs=1), 96 * 4)):
            llm.generate(PROMPTS[0], params)  # two steps of generated tokens make its graphs
            (sequence,) = llm.submit(PROMPTS[0], params)
            llm.step()
            while not sequence.finish_reason:
                copied.clear()
                before = device.n_launches
                llm.step()
                assert copied == [n_bytes] and device.n_launches == before


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("params", [GREEDY, TOP_K], ids=["greedy", "top_k"])
def test_what_is_not_a_number_is_noticed(
    folder: Path, gpus: Gpus, widths: list[int], tmp_path: Path, value: float,
    params: SamplingParams,
) -> None:  # fmt: skip
    """One weight of one row of the output matrix."""
    source = write(folder, "llama")
    data = bytearray(source.read_bytes())
    with GGUF(source) as file:
        info = file.tensors["output.weight"]
    kind = np.float32 if info.type.name == "f32" else np.float16  # a scale comes first in a block
    at = info.offset + 61 * info.row_bytes
    data[at : at + kind().itemsize] = kind(value).tobytes()
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    gpus(1 << 24)
    with load(path, ALL) as llm, pytest.raises(EdgeLLMError, match="at position 67 that are not"):
        llm.generate(PROMPTS[0], params)
    assert widths and 0 not in widths
