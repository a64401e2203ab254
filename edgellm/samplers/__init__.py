"""The steps of the sampling chain, found by name in ``STEPS``.

A new step is one function under ``@step("name")`` in a module imported here, and its name at the
place in ``names.ORDER`` where it belongs.
"""

from edgellm.samplers import dry, filters, penalties, temperature
from edgellm.samplers.chain import STEPS, Candidates, Context, largest, step

__all__ = [
    "STEPS", "Candidates", "Context", "dry", "filters", "largest", "penalties", "step",
    "temperature",
]  # fmt: skip
