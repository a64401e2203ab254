"""From options to speculation on a loaded model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.speculative.lookup import Lookup
from edgellm.speculative.options import SpeculationOptions
from edgellm.speculative.proposer import Proposer
from edgellm.speculative.speculation import Speculation
from edgellm.step_time import StepTime

if TYPE_CHECKING:
    from edgellm.llm import LLM


def build(llm: LLM, options: SpeculationOptions, step_time: StepTime) -> Speculation | None:
    """None where nothing is to be guessed."""
    proposers: list[Proposer] = []
    if options.uses_lookup:
        proposers.append(Lookup())
    if not proposers:
        return None
    return Speculation(
        proposers, options, step_time, llm.max_positions, llm.metrics.speculation,
        llm.graph.is_recurrent,
    )  # fmt: skip
