"""What one request asks of the sampler, and whether it can be asked."""

import math
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgellm.errors import EdgeLLMError
from edgellm.samplers.names import ORDER, parse_order

BREAKERS = ("\n", ":", '"', "*")
LogitBias = Mapping[Any, Any] | Iterable[tuple[int | str, float]]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Names and defaults are llama.cpp's; what it does not have is named as OpenAI names it.

    ``max_tokens`` can be 0 where only ``prompt_logprobs`` are wanted.
    ``json_schema`` (a dict or JSON text), ``grammar`` (Lark, or GBNF as far as it can be
    translated) or ``regex``: the answer keeps to it. ``logit_bias``: token ids, or texts whose
    every token is meant, to what is added to their logits; -inf (or False) bans them.
    """

    max_tokens: int | None = 128  # None: until the model stops or the context is full
    temperature: float = 0.8  # 0: greedy
    top_k: int = 40  # 0: off
    top_p: float = 0.95  # 1: off
    min_p: float = 0.05  # 0: off
    seed: int | None = None  # None or -1: a new one for every request
    stop: Sequence[str] = ()  # becomes a tuple; one string is taken as a list of one
    ignore_eos: bool = False
    logprobs: int = 0  # how many alternatives to report for each token; 0: none
    prompt_logprobs: int | None = None  # the same of the prompt's tokens; None: not asked for
    samplers: Sequence[str] = ORDER  # which steps in which order; also as "top_k;temperature"
    top_n_sigma: float = -1.0  # not above 0: off
    typical_p: float = 1.0  # 1: off
    xtc_probability: float = 0.0  # 0: off
    xtc_threshold: float = 0.1  # above 0.5: off
    repeat_last_n: int = 64  # tokens that the penalties look at; 0: off, -1: all
    repeat_penalty: float = 1.0  # 1: off
    presence_penalty: float = 0.0  # 0: off
    frequency_penalty: float = 0.0  # 0: off
    dry_multiplier: float = 0.0  # 0: off
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64  # 0: off, -1: all
    dry_sequence_breakers: Sequence[str] = BREAKERS
    dynatemp_range: float = 0.0  # 0: off
    dynatemp_exponent: float = 1.0
    mirostat: int = 0  # 2: steer the surprise by mirostat 2, in place of the steps but temperature
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    logit_bias: LogitBias = ()  # becomes a tuple of pairs
    json_schema: Mapping[str, Any] | bool | str | None = None
    grammar: str | None = None
    regex: str | None = None
    reasoning_budget: int = -1  # tokens of thinking; 0: none, -1: no limit

    def __post_init__(self) -> None:
        for name in ("stop", "dry_sequence_breakers"):
            value = getattr(self, name)
            value = () if value is None else value
            if not isinstance(value, Iterable):
                raise EdgeLLMError(f"{name} must be a text or a list of texts, not {value!r}.")
            texts = (value,) if isinstance(value, str) else tuple(value)
            object.__setattr__(self, name, texts)
            if not all(isinstance(text, str) and text for text in texts):
                raise EdgeLLMError(f"{name} must hold non-empty strings.")
        object.__setattr__(self, "samplers", parse_order(self.samplers))
        object.__setattr__(self, "logit_bias", _pairs(self.logit_bias))
        for name in ("top_k", "logprobs", "dry_allowed_length"):
            _require_int(name, getattr(self, name), 0)
        for name in ("repeat_last_n", "dry_penalty_last_n", "reasoning_budget"):
            _require_int(name, getattr(self, name), -1)
        if self.prompt_logprobs is not None:
            _require_int("prompt_logprobs", self.prompt_logprobs, 0)
        if self.max_tokens is not None:
            _require_int("max_tokens", self.max_tokens, 1 if self.prompt_logprobs is None else 0)
        if self.seed is not None:
            _require_int("seed", self.seed, -1)
        if self.mirostat not in (0, 2) or isinstance(self.mirostat, bool):
            raise EdgeLLMError(
                f"mirostat must be 0 or 2, not {self.mirostat!r}: version 1 is not supported."
            )
        for name in (
            "temperature", "dry_multiplier", "dynatemp_range", "dynatemp_exponent", "mirostat_tau",
            "mirostat_eta",
        ):  # fmt: skip
            _require_float(name, getattr(self, name), 0, math.inf)
        for name in ("top_p", "min_p", "typical_p", "xtc_probability", "xtc_threshold"):
            _require_float(name, getattr(self, name), 0, 1.0)
        for name in ("top_n_sigma", "presence_penalty", "frequency_penalty"):
            _require_float(name, getattr(self, name), -math.inf, math.inf)
        _require_float("dry_base", self.dry_base, 1, math.inf)
        _require_float("repeat_penalty", self.repeat_penalty, 1e-6, math.inf)
        for name in ("grammar", "regex"):
            if not isinstance(getattr(self, name), str | None):
                raise EdgeLLMError(f"{name} must be text.")
        if not isinstance(self.json_schema, Mapping | bool | str | None):
            raise EdgeLLMError("json_schema must be a JSON object, or its text.")
        if sum(value is not None for value in (self.json_schema, self.grammar, self.regex)) > 1:
            raise EdgeLLMError("Of json_schema, grammar and regex only one can be given.")

    @property
    def structured(self) -> bool:
        """Whether the answer has to keep to a schema, a grammar or a pattern."""
        return not (self.json_schema is None and self.grammar is None and self.regex is None)

    @property
    def penalizes(self) -> bool:
        """Whether the step "penalties" does anything."""
        none = self.repeat_penalty == 1 and self.presence_penalty == self.frequency_penalty == 0
        return not none and self.repeat_last_n != 0

    @property
    def dries(self) -> bool:
        """Whether the step "dry" does anything."""
        return self.dry_multiplier != 0 and self.dry_penalty_last_n != 0

    @property
    def greedy(self) -> bool:
        """True when the most likely token is always taken, so that no step need be run."""
        if (
            self.samplers != ORDER
            or self.mirostat
            or self.dynatemp_range > 0
            or self.logit_bias
            or self.penalizes
            or self.dries
            or self.typical_p < 1  # it can drop the most likely one
            or self.xtc_probability > 0
        ):
            return False
        return self.temperature == 0 or self.top_k == 1

    @property
    def n_best(self) -> int:
        """How many of the largest logits a draw depends on; 0: on all of them."""
        if self.greedy:
            return 1
        if self.mirostat or "top_k" not in self.samplers:
            return 0
        is_off = {
            "penalties": not self.penalizes,
            "dry": not self.dries,
            "top_n_sigma": self.top_n_sigma <= 0,
        }
        before = self.samplers[: self.samplers.index("top_k")]
        return self.top_k if all(is_off.get(name, False) for name in before) else 0

    def resolved_seed(self) -> int:
        """The seed to use for one request: the given one, else a fresh random one of 32 bits."""
        return secrets.randbits(32) if self.seed is None or self.seed == -1 else self.seed


def _pairs(bias: object) -> tuple[tuple[int | str, float], ...]:
    """Pairs of a token id or a text and a number. Keys of an object are texts in JSON, so one that
    is a number is an id, as llama.cpp has it."""
    if isinstance(bias, Mapping):
        bias = [
            (int(key) if isinstance(key, str) and re.fullmatch(r"\d{1,9}", key) else key, value)
            for key, value in bias.items()
        ]
    if isinstance(bias, str | bytes) or not isinstance(bias, Iterable):
        raise EdgeLLMError(f"logit_bias must hold pairs of a token and a number, not {bias!r}.")
    result: list[tuple[int | str, float]] = []
    for pair in bias:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise EdgeLLMError(f"logit_bias must hold pairs of a token and a number, not {pair!r}.")
        token, value = pair
        if isinstance(token, bool) or not isinstance(token, int | np.integer | str) or token == "":
            raise EdgeLLMError(f"logit_bias must hold token ids or texts, not {token!r}.")
        if value is False:
            value = -math.inf
        number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        if not number or not float(value) < math.inf:
            raise EdgeLLMError(f"logit_bias must be a number below infinity, not {value!r}.")
        result.append((token if isinstance(token, str) else int(token), float(value)))
    return tuple(result)


def _require_int(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < low:
        raise EdgeLLMError(f"{name} must be a whole number of at least {low}, not {value!r}.")


def _require_float(name: str, value: object, low: float, high: float) -> None:
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not number or not (low <= float(value) <= high) or math.isinf(float(value)):  # type: ignore[arg-type]
        if math.isinf(low):
            limit = "a finite number"
        elif math.isinf(high):
            limit = f"finite and at least {low:g}"
        else:
            limit = f"between {low:g} and {high:g}"
        raise EdgeLLMError(f"{name} must be {limit}, not {value!r}.")
