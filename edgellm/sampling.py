"""From logits to a token: a chain of pure filters, then one keyed draw.

The chain is the registry ``STEPS`` in the order of this file, which is llama.cpp's default order
(top_k, top_p, min_p, temperature: the filters look at the distribution at temperature 1). A new
step is one function under ``@step("name")``, placed where it belongs in the order, plus its field
in ``SamplingParams``; a step that is off returns what it was given.

Random numbers are a function of (seed, choice, position, token id) and of nothing else. The draw
is Gumbel-max: the token with the largest ``logit + noise(id)`` wins, which picks token i with
probability softmax(logits)[i]. So the same row gives the same token in any batch, with any
chunking, and with or without speculation, and a filter that removes losers cannot change the
winner.
"""

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgellm.errors import EdgeLLMError

Floats = npt.NDArray[np.floating[Any]]
Ids = npt.NDArray[np.integer[Any]]


class ModelProducedNaN(EdgeLLMError):
    """The logits hold no finite maximum: a damaged file or a kernel at fault."""

    def __init__(self, position: int | None = None) -> None:
        where = "" if position is None else f" at position {position}"
        super().__init__(
            f"The model produced logits{where} that are not numbers: the file may be damaged; "
            "EDGELLM_TRACE=ops names the operation they come from."
        )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What one request asks of the sampler. Names and defaults are llama.cpp's."""

    max_tokens: int | None = 128  # None: until the model stops or the context is full
    temperature: float = 0.8  # 0: greedy
    top_k: int = 40  # 0: off
    top_p: float = 0.95  # 1: off
    min_p: float = 0.05  # 0: off
    seed: int | None = None  # None or -1: a new one for every request
    stop: Sequence[str] = ()  # becomes a tuple; one string is taken as a list of one
    ignore_eos: bool = False
    logprobs: int = 0  # how many alternatives to report for each token; 0: none

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        _require_int("top_k", self.top_k, 0)
        _require_int("logprobs", self.logprobs, 0)
        if self.max_tokens is not None:
            _require_int("max_tokens", self.max_tokens, 1)
        if self.seed is not None:
            _require_int("seed", self.seed, -1)
        _require_float("temperature", self.temperature, math.inf)
        _require_float("top_p", self.top_p, 1.0)
        _require_float("min_p", self.min_p, 1.0)
        if not all(isinstance(text, str) and text for text in stop):
            raise EdgeLLMError("stop must hold non-empty strings.")

    @property
    def greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature == 0 or self.top_k == 1

    def resolved_seed(self) -> int:
        """The seed to use for one request: the given one, else a fresh random one of 32 bits."""
        return secrets.randbits(32) if self.seed is None or self.seed == -1 else self.seed


def _require_int(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < low:
        raise EdgeLLMError(f"{name} must be a whole number of at least {low}, not {value!r}.")


def _require_float(name: str, value: object, high: float) -> None:
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not number or not (0 <= float(value) <= high) or math.isinf(float(value)):  # type: ignore[arg-type]
        limit = "finite and at least 0" if math.isinf(high) else f"between 0 and {high:g}"
        raise EdgeLLMError(f"{name} must be {limit}, not {value!r}.")


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens still in the running.

    ``ids`` None stands for the whole vocabulary in order: an arange of 152,000 would cost more than
    the filters. ``ordered`` means falling logits, equal ones by rising id; what is not ordered
    stands by rising id, so that "the first of equals" is always the lowest id.
    """

    logits: Floats
    ids: Ids | None = None
    ordered: bool = False

    def take(self, index: Any, ordered: bool = False) -> "Candidates":
        """Those at ``index`` (positions, a mask or a slice)."""
        if self.ids is not None:
            ids = self.ids[index]
        elif isinstance(index, slice):
            ids = np.arange(len(self.logits))[index]
        else:
            index = np.flatnonzero(index) if index.dtype == np.bool_ else index
            ids = index
        return Candidates(self.logits[index], ids, ordered)

    def head(self, k: int) -> "Candidates":
        """The k largest, ordered."""
        if self.ordered:
            return self.take(slice(k), True)
        return self.take(largest(self.logits, k), True)


Step = Callable[[Candidates, SamplingParams], Candidates]
STEPS: dict[str, Step] = {}


def step(name: str) -> Callable[[Step], Step]:
    """Register a step of the chain; steps run in the order of their definition."""

    def register(function: Step) -> Step:
        STEPS[name] = function
        return function

    return register


@step("top_k")
def top_k(candidates: Candidates, params: SamplingParams) -> Candidates:
    """Keep the k most likely."""
    if params.top_k == 0 or params.top_k >= len(candidates.logits):
        return candidates
    return candidates.head(params.top_k)


@step("top_p")
def top_p(candidates: Candidates, params: SamplingParams) -> Candidates:
    """Keep the fewest most likely ones whose probabilities sum to at least p."""
    if params.top_p >= 1:
        return candidates
    logits = candidates.logits
    peak = logits.max()
    wanted = params.top_p * float(np.exp(logits - peak).sum(dtype=np.float64))

    def nucleus(falling: Floats) -> int:
        """How many it takes, or one more than there are."""
        sums = np.exp(falling - peak).cumsum(dtype=np.float64)
        return int(np.searchsorted(sums, wanted)) + 1

    # The nucleus is nearly always small: only a flat distribution pays for sorting everything.
    head = candidates.head(min(256, len(logits)))
    count = nucleus(head.logits)
    if count <= len(head.logits) or len(head.logits) == len(logits):
        return head.take(slice(count), True)
    falling = np.sort(logits)[::-1]
    count = min(nucleus(falling), len(logits))
    keep = logits >= falling[count - 1]
    equals = np.flatnonzero(logits == falling[count - 1])
    keep[equals[len(equals) - (int(keep.sum()) - count) :]] = False  # the lowest ids stay
    return candidates.take(keep)


@step("min_p")
def min_p(candidates: Candidates, params: SamplingParams) -> Candidates:
    """Keep those at least min_p times as likely as the most likely one."""
    if params.min_p == 0:
        return candidates
    floor = candidates.logits.max() + np.float32(math.log(params.min_p))
    return candidates.take(candidates.logits >= floor, candidates.ordered)


@step("temperature")
def temperature(candidates: Candidates, params: SamplingParams) -> Candidates:
    """Flatten (above 1) or sharpen (below 1) what the filters left."""
    if params.temperature == 1:
        return candidates
    scaled = candidates.logits / np.float64(params.temperature)
    return Candidates(scaled, candidates.ids, candidates.ordered)


def sample(
    logits: npt.NDArray[np.float32],  # [n_vocab]
    params: SamplingParams,
    seed: int,
    position: int,
    choice: int = 0,
) -> int:
    """The token that follows. ``position`` is the sequence position the token will take."""
    best = int(logits.argmax())  # numpy finds a NaN first, and the lowest id among equals
    if not math.isfinite(logits[best]):
        raise ModelProducedNaN(position)
    if params.greedy:
        return best
    candidates = Candidates(logits)
    for run in STEPS.values():
        candidates = run(candidates, params)
    ids = np.arange(len(logits)) if candidates.ids is None else candidates.ids
    winner = (candidates.logits + keyed_gumbel(seed, choice, position, ids)).argmax()
    return int(ids[winner])


def log_softmax_top(
    logits: npt.NDArray[np.float32], token: int, n: int
) -> tuple[float, list[tuple[int, float]]]:
    """Log probability of ``token`` and the n most likely (id, log probability), best first.

    These are the model's own probabilities, before any filter or temperature.
    """
    peak = logits.max()
    if not math.isfinite(peak):
        raise ModelProducedNaN
    log_sum = float(peak) + math.log(float(np.exp(logits - peak).sum(dtype=np.float64)))
    index = largest(logits, min(n, len(logits))) if n else np.zeros(0, np.intp)
    top = [(int(i), float(logits[i]) - log_sum) for i in index]
    return float(logits[token]) - log_sum, top


BLOCK = 64  # elements under one maximum in `largest`: 2,400 maxima for a vocabulary of 152,000


def largest(values: Floats, k: int) -> npt.NDArray[np.intp]:
    """Positions of the k largest values, falling; equal values by rising position.

    The k-th largest of the maxima of blocks is a bound that k values reach, so only the blocks
    whose maximum reaches it are looked at: about k * BLOCK values instead of all. The blocks are
    strided (block j holds j, j + n_blocks, ...), which lets numpy take all maxima in vector order.
    """
    n_blocks = len(values) // BLOCK
    if n_blocks > 2 * k:
        grid = values[: n_blocks * BLOCK].reshape(BLOCK, n_blocks)
        maxima = grid.max(axis=0)
        bound = np.partition(maxima, n_blocks - k)[n_blocks - k]
        columns = np.flatnonzero(maxima >= bound)
        rows, hits = np.nonzero(grid[:, columns] >= bound)
        tail = np.flatnonzero(values[n_blocks * BLOCK :] >= bound) + n_blocks * BLOCK
        index = np.concatenate((rows * n_blocks + columns[hits], tail))
    else:
        bound = np.partition(values, len(values) - k)[len(values) - k]
        index = np.flatnonzero(values >= bound)
    return index[np.lexsort((index, -values[index]))[:k]]


# Constants of splitmix64 (Steele, Lea and Flood 2014): the odd increment and its finaliser.
_STRIDE, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def _mix(x: int) -> int:
    """splitmix64's finaliser: every bit of the input reaches every bit of the output."""
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def keyed_gumbel(seed: int, choice: int, position: int, ids: Ids) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise for each id, a pure function of (seed, choice, position, id).

    A counter-based generator: the three numbers are folded into a 64-bit key, one finaliser each;
    token id i then gets the i-th output of the splitmix64 stream that starts at that key.
    """
    key = 0
    for number in (seed, choice, position):
        key = _mix((key + (number + 1) * _STRIDE) & _MASK)
    x = ids.astype(np.uint64)
    x += np.uint64(1)
    x *= np.uint64(_STRIDE)
    x += np.uint64(key)
    x ^= x >> np.uint64(30)
    x *= np.uint64(_MIX_1)
    x ^= x >> np.uint64(27)
    x *= np.uint64(_MIX_2)
    x ^= x >> np.uint64(31)
    # 52 bits and a half step stay strictly inside (0, 1); with 53 the top value rounds to 1.
    uniform = ((x >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    noise: npt.NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise
