"""What is asked of speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.errors import EdgeLLMError

KINDS = ("none", "lookup", "draft", "auto")
MOST_GUESSES = 60


@dataclass(frozen=True)
class SpeculationOptions:
    """``kind``: "lookup" guesses from the text itself, "draft" with ``model``, "auto" with both,
    lookup first, or with lookup alone where there is no model. At most ``n_max`` guesses are
    checked at once, and never fewer than ``n_min``; a draft model stops where it thinks less than
    ``p_min`` of its own guess. ``n_threads`` (None: automatic) and ``cores`` (a hexadecimal mask)
    are the draft model's, as are ``n_gpu_layers`` and the types of its keys and values."""

    kind: str = "none"
    n_max: int = 15  # with the token before them two tiles of rows
    n_min: int = 0
    p_min: float = 0.0
    model: str | None = None
    n_threads: int | None = None
    cores: str | None = None
    n_gpu_layers: int | None = None
    type_k: str = "f16"
    type_v: str = "f16"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise EdgeLLMError(f"--spec-type must be {', '.join(KINDS)}, not {self.kind!r}.")
        if self.kind == "draft" and self.model is None:
            raise EdgeLLMError("--spec-type draft needs a draft model (-md, --model-draft).")
        if not 1 <= self.n_max <= MOST_GUESSES:
            raise EdgeLLMError(f"--draft-max must be 1 to {MOST_GUESSES} tokens, not {self.n_max}.")
        if not 0 <= self.n_min <= self.n_max:
            raise EdgeLLMError(
                f"--draft-min must be 0 to --draft-max ({self.n_max}) tokens, not {self.n_min}."
            )
        if not 0 <= self.p_min <= 1:
            raise EdgeLLMError(f"--draft-p-min must be a probability, not {self.p_min}.")

    @property
    def uses_lookup(self) -> bool:
        return self.kind in ("lookup", "auto")

    @property
    def uses_model(self) -> bool:
        return self.kind in ("draft", "auto") and self.model is not None
