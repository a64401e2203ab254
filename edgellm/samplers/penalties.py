"""Penalties for tokens that stand among the last ones."""

from typing import TYPE_CHECKING

import numpy as np

from edgellm.samplers.chain import Candidates, Context, step

if TYPE_CHECKING:
    from edgellm.sampling_params import SamplingParams


@step("penalties")
def penalties(candidates: Candidates, params: "SamplingParams", context: Context) -> Candidates:
    """Of each token among the last ``repeat_last_n``: divide its logit (multiply a negative one)
    by ``repeat_penalty``, and take off ``frequency_penalty`` for every time it stands there and
    ``presence_penalty`` once."""
    if not params.penalizes:
        return candidates
    ids, counts = np.unique(context.last(params.repeat_last_n), return_counts=True)
    where, which = candidates.places(ids)
    logits = candidates.logits[where].astype(np.float64)
    factor = params.repeat_penalty
    logits = np.where(logits <= 0, logits * factor, logits / factor)
    logits -= counts[which] * params.frequency_penalty + params.presence_penalty
    return candidates.changed(where, logits)
