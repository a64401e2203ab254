"""Temperature, fixed or moved by the entropy, and mirostat, which steers the surprise."""

import math
from typing import TYPE_CHECKING

import numpy as np

from edgellm.samplers.chain import Candidates, Context, Floats, probabilities, step

if TYPE_CHECKING:
    from edgellm.sampling_params import SamplingParams


@step("temperature")
def temperature(candidates: Candidates, params: "SamplingParams", context: Context) -> Candidates:
    """Flatten (above 1) or sharpen (below 1) what the filters left; 0 leaves the best one."""
    value = params.temperature
    if params.dynatemp_range > 0:
        value = dynamic(candidates, params)
    if value == 0:
        return candidates.head(1)
    if value == 1:
        return candidates
    scaled = candidates.logits / np.float64(value)
    return Candidates(scaled, candidates.ids, candidates.ordered)


def dynamic(candidates: Candidates, params: "SamplingParams") -> float:
    """A temperature from ``temperature - range`` for a certain model to ``temperature + range``
    for a clueless one: the entropy as a share of the greatest possible, to ``exponent``."""
    n = len(candidates.logits)
    if n < 2:
        return 1.0  # one token is the answer at any temperature
    low = max(0.0, params.temperature - params.dynatemp_range)
    high = params.temperature + params.dynatemp_range
    share = min(1.0, max(0.0, _entropy(candidates.logits) / math.log(n)))
    return low + (high - low) * math.pow(share, params.dynatemp_exponent)


def _entropy(logits: Floats) -> float:
    """In nats. All terms are positive, so that the entropy of a model that is all but certain is
    as exact as any: 1 - p of the best token is never taken from 1."""
    below = logits.astype(np.float64) - float(logits.max())
    weights = np.exp(below)
    weights[int(below.argmax())] = 0.0
    seen = weights > 0
    rest = float(weights.sum())
    return math.log1p(rest) - float((weights[seen] * below[seen]).sum()) / (1.0 + rest)


def mirostat(candidates: Candidates, mu: float) -> Candidates:
    """Keep the tokens whose surprise is at most mu bits, and always the best one (Basu et al.
    2021, version 2)."""
    with np.errstate(divide="ignore"):
        surprise = -np.log2(probabilities(candidates.logits))
    keep = surprise <= mu
    if not keep.any():
        return candidates.head(1)
    return candidates.take(keep, candidates.ordered)


def mirostat_step(mu: float, kept: Candidates, place: int, params: "SamplingParams") -> float:
    """mu after the token at ``place`` was drawn: its surprise among those kept is to come nearer
    to ``mirostat_tau``."""
    surprise = -math.log2(probabilities(kept.logits)[place])
    return mu - params.mirostat_eta * (surprise - params.mirostat_tau)
