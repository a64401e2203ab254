"""From logits to a token: a chain of pure steps, then one keyed draw.

The steps are in ``edgellm/samplers``; ``SamplingParams.samplers`` says which of them run in which
order, by default llama.cpp's (penalties, dry, top_n_sigma, top_k, typ_p, top_p, min_p, xtc,
temperature: the filters look at the distribution at temperature 1). Before the chain come biases,
the user's own functions and the mask of a grammar.

Random numbers are a function of (seed, choice, position, token id) and of nothing else. The draw
is Gumbel-max: the token with the largest ``logit + noise(id)`` wins, which picks token i with
probability softmax(logits)[i]. So the same row gives the same token in any batch, with any
chunking, and with or without speculation, and a filter that removes losers cannot change the
winner.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgellm.errors import EdgeLLMError
from edgellm.samplers.chain import NO_TOKENS, STEPS, Candidates, Context, Floats, Ids, largest
from edgellm.samplers.noise import keyed_gumbel
from edgellm.samplers.temperature import mirostat, mirostat_step
from edgellm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from edgellm.structured import Matcher
    from edgellm.tokenizer import Tokenizer
    from edgellm.tools.budget import ReasoningBudget

Row = npt.NDArray[np.float32]
UserSampler = Callable[[Row, npt.NDArray[np.int64], int], None]
Bias = tuple[npt.NDArray[np.int64], Row]


class ModelProducedNaN(EdgeLLMError):
    """The logits hold no finite maximum: a damaged file or a kernel at fault."""

    def __init__(self, position: int | None = None) -> None:
        where = "" if position is None else f" at position {position}"
        super().__init__(
            f"The model produced logits{where} that are not numbers: the file may be damaged; "
            "EDGELLM_TRACE=ops names the operation they come from."
        )


class NothingLeft(EdgeLLMError):
    """Biases or user samplers leave no token to choose."""


class Sampler:
    """Draws the tokens of one sequence.

    ``draw`` is a function of its arguments, but for what the sequence has been through: the state
    of a matcher, of a budget, and mirostat's mu, which ``accept`` and ``draw`` move on.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        *,
        bias: Bias | None = None,
        users: Sequence[UserSampler] = (),
        matcher: "Matcher | None" = None,
        budget: "ReasoningBudget | None" = None,
        piece: Callable[[int], bytes] | None = None,
        choice: int = 0,
    ) -> None:
        self.params, self.seed, self._choice = params, seed, choice
        self._bias, self._users, self._matcher = bias, users, matcher
        self._piece, self._budget = piece, budget
        self._plain = bias is None and not users
        self._greedy = params.greedy and self._plain and matcher is None
        # of the largest logits, those that a draw depends on; 0: all of them
        self.n_best = params.n_best if self._plain and matcher is None else 0
        self._mu = 2 * params.mirostat_tau
        self._known = 0  # tokens of the history buffer
        self._buffer = NO_TOKENS
        self._looks_back = bool(users) or params.penalizes or params.dries

    def draw(
        self, logits: Row | Candidates, tokens: Sequence[int], position: int | None = None
    ) -> int:
        """The token that follows ``tokens``. ``position`` is the sequence position it will take.

        logits: float32 [n_vocab], left as they are; or ``n_best`` of them or more, with which the
        token is the same
        """
        position = len(tokens) if position is None else position
        candidates = logits if isinstance(logits, Candidates) else Candidates(logits)
        best, peak = candidates.best
        if not math.isfinite(peak):
            raise ModelProducedNaN(position)
        n_logits = len(candidates.logits)
        if (forced := self._forced(n_logits)) is not None:
            return forced
        if self._greedy:
            return best
        history = self._history(tokens) if self._looks_back else NO_TOKENS
        if not self._plain:
            candidates = Candidates(self._change(candidates.logits, history, position))
        if self._matcher is not None:
            allowed = self._matcher.allowed(n_logits, self.params.ignore_eos)
            candidates = candidates.take(allowed)
            if not math.isfinite(candidates.logits.max()):
                raise NothingLeft(
                    "A logit bias or a user sampler bans every token that the grammar allows here."
                )
        context = Context(self.seed, position, self._choice, history)
        if self._piece is not None:
            context = Context(self.seed, position, self._choice, history, self._piece)
        if self.params.mirostat:
            return self._mirostat(candidates, context)
        for name in self.params.samplers:
            candidates = STEPS[name](candidates, self.params, context)
        ids, place = pick(candidates, context)
        return int(ids[place])

    def _forced(self, n_logits: int) -> int | None:
        """What the budget wants, unless the grammar does not know of thoughts."""
        token = None if self._budget is None else self._budget.forced()
        if token is None or self._matcher is None:
            return token
        return token if token in self._matcher.allowed(n_logits) else None

    def accept(self, token: int) -> bool:
        """Tell the budget and the grammar the token that was taken; True when the answer is
        complete with it."""
        if self._budget is not None:
            self._budget.accept(token)
        return self._matcher is not None and self._matcher.accept(token)

    def for_drafts(self) -> "Sampler":
        """One that draws with the same noise, for a model that guesses what this one will draw: of
        what the answer has been through it knows nothing."""
        params = replace(self.params, mirostat=0)
        return Sampler(
            params, self.seed, bias=self._bias, users=self._users, piece=self._piece,
            choice=self._choice,
        )  # fmt: skip

    def n_allowed(self, tokens: Sequence[int]) -> int:
        """How many of these tokens the grammar lets follow, one after the other."""
        return len(tokens) if self._matcher is None else self._matcher.n_allowed(tokens)

    def _change(self, given: Floats, history: npt.NDArray[np.int64], position: int) -> Row:
        """Biases, then the user's own functions, on a copy."""
        logits = given.astype(np.float32)
        if self._bias is not None:
            ids, values = self._bias
            logits[ids] += values
        for user in self._users:
            user(logits, history, position)
        peak = logits.max()
        if np.isnan(peak) or peak == math.inf:
            names = ", ".join(getattr(user, "__name__", "?") for user in self._users)
            raise NothingLeft(
                f"A user sampler left logits at position {position} that are not numbers: {names}."
            )
        if peak == -math.inf:
            raise NothingLeft("Logit biases or user samplers ban every token.")
        return logits

    def _mirostat(self, candidates: Candidates, context: Context) -> int:
        if "temperature" in self.params.samplers:
            candidates = STEPS["temperature"](candidates, self.params, context)
        kept = mirostat(candidates, self._mu)
        ids, place = pick(kept, context)
        self._mu = mirostat_step(self._mu, kept, place, self.params)
        return int(ids[place])

    def _history(self, tokens: Sequence[int]) -> npt.NDArray[np.int64]:
        """The tokens as an array. They grow at the end, so what was copied before stays."""
        n, known = len(tokens), self._known
        if known > n or (known and self._buffer[known - 1] != tokens[known - 1]):
            known = 0
        if n > len(self._buffer):
            buffer = np.empty(max(256, 2 * n), np.int64)
            buffer[:known] = self._buffer[:known]
            self._buffer = buffer
        self._buffer[known:n] = tokens[known:]
        self._known = n
        return self._buffer[:n]


def pick(candidates: Candidates, context: Context) -> tuple[Ids, int]:
    """(ids, place): the one draw."""
    ids = candidates.ids
    if ids is None:
        ids = np.arange(len(candidates.logits))
    if len(ids) == 1:
        return ids, 0
    noise = keyed_gumbel(context.seed, context.choice, context.position, ids)
    return ids, int((candidates.logits + noise).argmax())


def sample(
    logits: Row,  # [n_vocab]
    params: SamplingParams,
    seed: int,
    position: int,
    choice: int = 0,
    tokens: Sequence[int] = (),
) -> int:
    """The token that follows, for parameters that need neither a tokenizer nor a state."""
    return Sampler(params, seed, choice=choice).draw(logits, tokens, position)


def resolve_bias(params: SamplingParams, tokenizer: "Tokenizer", n_vocab: int) -> Bias | None:
    """Token ids and what is added to their logits; biases of the same token add up."""
    sums: dict[int, float] = {}
    for token, value in params.logit_bias:
        ids = tokenizer.encode(token) if isinstance(token, str) else [token]
        for i in ids:
            if not 0 <= i < n_vocab:
                raise EdgeLLMError(
                    f"logit_bias names token {i}, which is not in the vocabulary of {n_vocab}."
                )
            sums[i] = sums.get(i, 0.0) + value
    if not sums:
        return None
    return np.array(list(sums), np.int64), np.array(list(sums.values()), np.float32)


def log_softmax_top(logits: Floats, token: int, n: int) -> tuple[float, list[tuple[int, float]]]:
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


__all__ = [
    "STEPS", "Candidates", "Context", "ModelProducedNaN", "NothingLeft", "Sampler",
    "SamplingParams", "keyed_gumbel", "largest", "log_softmax_top", "pick", "resolve_bias",
    "sample",
]  # fmt: skip
