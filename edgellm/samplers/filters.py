"""Steps that throw unlikely (or too likely) tokens out. They look at the logits as they find them;
in the default order that is at temperature 1."""

import math
from typing import TYPE_CHECKING

import numpy as np

from edgellm.samplers.chain import Candidates, Context, Floats, probabilities, step
from edgellm.samplers.noise import XTC

if TYPE_CHECKING:
    from edgellm.sampling_params import SamplingParams


@step("top_n_sigma")
def top_n_sigma(candidates: Candidates, params: "SamplingParams", context: Context) -> Candidates:
    """Keep those at most n standard deviations of the logits below the best one."""
    if params.top_n_sigma <= 0 or len(candidates.logits) < 2:
        return candidates
    logits = candidates.logits
    real = logits if logits.min() > -math.inf else logits[logits > -math.inf]  # none that is banned
    apart = real - real.mean(dtype=np.float64)
    spread = math.sqrt(float((apart * apart).mean(dtype=np.float64)))
    floor = float(real.max()) - params.top_n_sigma * spread
    return candidates.take(logits >= floor, candidates.ordered)


@step("top_k")
def top_k(candidates: Candidates, params: "SamplingParams", context: Context) -> Candidates:
    """Keep the k most likely."""
    if params.top_k == 0 or params.top_k >= len(candidates.logits):
        return candidates
    return candidates.head(params.top_k)


@step("typ_p")
def typical(candidates: Candidates, params: "SamplingParams", context: Context) -> Candidates:
    """Keep the tokens whose surprise is nearest to the expected one, until their probabilities
    sum to more than p (Meister et al. 2022)."""
    if params.typical_p >= 1:
        return candidates
    p = probabilities(candidates.logits)
    with np.errstate(divide="ignore"):
        surprise = -np.log(p)
    entropy = float((p * np.where(p > 0, surprise, 0.0)).sum())
    nearest = np.argsort(np.abs(surprise - entropy), kind="stable")
    count = int(np.searchsorted(p[nearest].cumsum(), params.typical_p, side="right")) + 1
    keep = np.zeros(len(p), np.bool_)
    keep[nearest[:count]] = True
    return candidates.take(keep, candidates.ordered)


@step("top_p")
def top_p(candidates: Candidates, params: "SamplingParams", context: Context) -> Candidates:
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
def min_p(candidates: Candidates, params: "SamplingParams", context: Context) -> Candidates:
    """Keep those at least min_p times as likely as the most likely one."""
    if params.min_p == 0:
        return candidates
    floor = candidates.logits.max() + np.float32(math.log(params.min_p))
    return candidates.take(candidates.logits >= floor, candidates.ordered)


@step("xtc")
def xtc(candidates: Candidates, params: "SamplingParams", context: Context) -> Candidates:
    """Exclude top choices: with a probability, drop all tokens that reach the threshold but the
    least likely of them. Whether it strikes is a function of the position alone."""
    off = params.xtc_probability == 0 or params.xtc_threshold > 0.5  # two cannot reach more
    if off or len(candidates.logits) < 2 or context.uniform(XTC) > params.xtc_probability:
        return candidates
    p = probabilities(candidates.logits)
    reach = np.flatnonzero(p >= params.xtc_threshold)
    if len(reach) < 2:
        return candidates
    # The last of the least likely ones stays: of equals the one with the highest id.
    least = reach[len(reach) - 1 - int(p[reach][::-1].argmin())]
    keep = p < params.xtc_threshold
    keep[least] = True
    return candidates.take(keep, candidates.ordered)
