"""What it brings that a draft model writes while the target checks, on a pair of known speeds.

    python benchmarks/draft_ahead.py

Both are one tiny model, whose steps are made to last: the target's ``--step`` seconds whatever its
rows, as a device's that has arithmetic to spare, the draft's half of that. While they last nothing
is held that another thread needs. A guess is right with the probability ``--rate``, drawn from a
hash of ``--seed`` and its place; where it is wrong the draft's second choice is right with
``--second``. Shown are the target alone, the pair in turns with each length of draft, and the draft
model ahead.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from edgellm import LLM, SamplingParams
from edgellm.sampling import Sampler
from edgellm.speculative import build
from edgellm.speculative.ahead import DraftAhead
from edgellm.speculative.cores import Division, Share
from edgellm.speculative.draft_model import DraftModel
from edgellm.speculative.options import SpeculationOptions

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import tiny  # noqa: E402

LENGTHS = (1, 2, 3)


class Guesser:
    """The target's sampler, but for guesses that are to be wrong."""

    def __init__(self, true: Sampler, rate: float, second: float, seed: int) -> None:
        self._true, self._rate, self._second, self._seed = true, rate, second, seed

    def draw(self, logits: Any, tokens: list[int]) -> int:
        token, n = self._true.draw(logits, tokens), len(logits)
        is_second = bool(np.isneginf(logits).any())  # the first choice is not to be had
        if not is_second:
            return token if self._chance(tokens, 0) < self._rate else (token + 1) % n
        if self._chance(tokens, 0) < self._rate:
            return token  # the first was right: whatever this is, it is wrong
        return token if self._chance(tokens, 1) < self._second else (token + 2) % n

    def _chance(self, tokens: list[int], purpose: int) -> float:
        return _chance(tokens, (self._seed, purpose))


def _chance(tokens: list[int], purpose: tuple[int, int]) -> float:
    """A number in (0, 1) for a place; of 20 places in a row each twentieth has one."""
    block, place = divmod(len(tokens), 20)
    seed = int.from_bytes(hashlib.blake2b(repr((purpose, block)).encode()).digest()[:8], "big")
    return float((np.random.default_rng(seed).permutation(20)[place] + 0.5) / 20)


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def lasting(forward: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """A step that is over after so many seconds."""

    def step(runs: Any) -> Any:
        end = time.perf_counter() + seconds
        rows = forward(runs)
        time.sleep(max(0.0, end - time.perf_counter()))
        return rows

    return step


def measure(path: Path, step: float, n_tokens: int, is_apart: bool | None) -> tuple[float, LLM]:
    """Tokens per second; ``is_apart`` None: without a draft model."""
    division = Division(Share(1), Share(1), bool(is_apart))
    options = SpeculationOptions("none" if is_apart is None else "draft", model=str(path))
    params = SamplingParams(max_tokens=n_tokens, temperature=0.8, seed=5, ignore_eos=True)
    with replaced(build, divide=lambda *arguments: division):
        llm = LLM(path, n_threads=1, max_num_seqs=1, speculation=options)
    with llm:
        llm.runner.forward = lasting(llm.runner.forward, step)  # type: ignore[method-assign]
        if is_apart is not None:
            assert llm.speculation is not None
            drafter = llm.speculation.proposers[0].drafter  # type: ignore[attr-defined]
            runner = drafter.llm.runner
            runner.forward = lasting(runner.forward, step / 2)
        llm.generate("Warm up.", SamplingParams(max_tokens=16, ignore_eos=True))
        done = llm.generate("Once upon a time", params)
        return done.timings["predicted_per_second"], llm


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--step", type=float, default=0.05, help="seconds of a step of the target")
    parser.add_argument("--rate", type=float, default=0.7)
    parser.add_argument("--second", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0, help="which guesses are right")
    parser.add_argument("-n", type=int, default=500, help="tokens")
    given = parser.parse_args()
    folder = tempfile.TemporaryDirectory()
    path = tiny.build(Path(folder.name) / "tiny.gguf", n_ctx=2048)
    for_drafts = Sampler.for_drafts

    def guesser(sampler: Sampler) -> Any:
        return Guesser(for_drafts(sampler), given.rate, given.second, given.seed)

    def show(name: str, speed: float, llm: LLM, best: float) -> None:
        counts = llm.metrics.speculation
        rate = counts.accepted_at[0] / max(1, counts.drafted_at[0])
        print(f"{name:24} {speed:7.1f} tokens/s  {speed / best:5.2f} x  first guess right: "
              f"{100 * rate:.0f} %", flush=True)  # fmt: skip

    with replaced(Sampler, for_drafts=guesser):
        alone, llm = measure(path, given.step, given.n, None)
        show("target alone", alone, llm, alone)
        best = alone
        for n in LENGTHS:
            fixed = {"_length": lambda self, wanted, n=n: n if wanted else 0,
                     "_least": lambda self, use, n: 0.0,
                     "_pays": lambda self, sequence, use, n: True}  # fmt: skip
            with replaced(DraftModel, **fixed):
                speed, llm = measure(path, given.step, given.n, False)
            show(f"in turns, {n} guesses", speed, llm, alone)
            best = max(best, speed)
        speed, llm = measure(path, given.step, given.n, False)
        show("in turns, controller", speed, llm, alone)
        best = max(best, speed)
        speed, llm = measure(path, given.step, given.n, True)
        show("ahead", speed, llm, alone)
        assert DraftAhead.name == "draft"
        print(f"ahead / best in turns: {speed / best:.2f} x")
    folder.cleanup()


if __name__ == "__main__":
    main()
