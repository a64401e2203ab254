"""What a step takes and gives: the tokens still in the running, and what it may know."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgellm.samplers.noise import keyed_uniform

if TYPE_CHECKING:
    from edgellm.sampling_params import SamplingParams

Floats = npt.NDArray[np.floating[Any]]
Ids = npt.NDArray[np.integer[Any]]
NO_TOKENS = np.zeros(0, np.int64)


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

    @property
    def best(self) -> tuple[int, float]:
        """The id and logit of the most likely one, the lowest id among equals; a NaN if there is
        any."""
        place = 0 if self.ordered else int(self.logits.argmax())  # numpy finds a NaN first
        return place if self.ids is None else int(self.ids[place]), float(self.logits[place])

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

    def places(self, ids: Ids) -> tuple[Ids, Ids]:
        """(where, which): the given ids (rising, each once) that are still in the running stand
        at ``where`` among the candidates; ``which`` are their positions in ``ids``."""
        if self.ids is None:
            which = np.flatnonzero(ids < len(self.logits))
            return ids[which], which
        sorter = np.argsort(self.ids) if self.ordered else None
        spot = np.searchsorted(self.ids, ids, sorter=sorter)
        spot = np.minimum(spot, len(self.ids) - 1)
        where = spot if sorter is None else sorter[spot]
        which = np.flatnonzero(self.ids[where] == ids)
        return where[which], which

    def changed(self, where: Ids, logits: Floats) -> "Candidates":
        """With other logits at those places."""
        if len(where) == 0:
            return self
        values = self.logits.copy()
        values[where] = logits
        if not self.ordered or self.ids is None:
            return Candidates(values, self.ids)
        rising = np.argsort(self.ids)  # the order is broken
        return Candidates(values[rising], self.ids[rising])


def _no_piece(token: int) -> bytes:
    return b""


@dataclass(frozen=True, slots=True)
class Context:
    """Where the token will stand and what stands before it."""

    seed: int
    position: int
    choice: int = 0
    # prompt and answer so far
    tokens: npt.NDArray[np.int64] = field(default_factory=lambda: NO_TOKENS)
    piece: Callable[[int], bytes] = _no_piece  # the bytes of a token

    def uniform(self, purpose: int) -> float:
        """A number inside (0, 1), the same whenever this token is drawn; see noise.py."""
        return keyed_uniform(self.seed, self.choice, self.position, purpose)

    def last(self, n: int) -> npt.NDArray[np.int64]:
        """The last n tokens; -1: all."""
        return self.tokens if n < 0 else self.tokens[max(0, len(self.tokens) - n) :]


Step = Callable[[Candidates, "SamplingParams", Context], Candidates]
STEPS: dict[str, Step] = {}


def step(name: str) -> Callable[[Step], Step]:
    """Register a step of the chain. A step that is off returns what it was given."""

    def register(function: Step) -> Step:
        STEPS[name] = function
        return function

    return register


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


def probabilities(logits: Floats) -> npt.NDArray[np.float64]:
    """Softmax in float64, so that no step depends on how many candidates there are."""
    weights = np.exp(logits.astype(np.float64) - float(logits.max()))
    result: npt.NDArray[np.float64] = weights / weights.sum()
    return result
