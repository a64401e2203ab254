"""What clients ask of a server in a simulation: named scenarios, the same for the same seed.

A scenario is a function from a ``Maker``, which knows the machine's speed and has the random
numbers, to requests. Lengths are shares of the context, made smaller on slow machines, so that a
scenario takes about a minute. Prompts are arbitrary tokens; what they share is said.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgellm.errors import EdgeLLMError

SECONDS = 60.0  # that a scenario should take
_LEAST_REQUESTS, _MOST_REQUESTS = 20, 200
_LOAD = 0.7  # of what the machine can do: queues stay short, but are there
_SMALLEST = 1 / 16  # of the lengths on a very slow machine

# Lengths of a prompt and an answer, as shares of the context.
PROMPTS = {"short": (1 / 128, 1 / 32), "mid": (1 / 16, 5 / 32), "long": (1 / 4, 1 / 2)}
ANSWERS = {"short": (1 / 256, 1 / 64), "mid": (3 / 128, 7 / 128), "long": (5 / 64, 5 / 32)}
MIX = {("short", "short"): 0.4, ("mid", "mid"): 0.4, ("long", "long"): 0.2}
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 9999},
        "names": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["colour", "size", "names"],
    "additionalProperties": False,
}
_SYSTEM, _QUESTION, _ANSWER, TURNS = 800, 40, 48, 5  # tokens of a chat in a context of 2048


@dataclass(frozen=True)
class Speed:
    """Tokens a second, of prompts and of as many answers as run together."""

    prefill: float
    decode: float


@dataclass
class Ask:
    """A request that arrives ``at`` seconds. ``cancel_after`` and ``timeout`` are seconds from
    then. When it is done, ``then`` makes the next one from its output, which arrives at once."""

    at: float
    prompt: list[int]
    max_tokens: int
    kind: str
    priority: str = "interactive"
    turn: int = 0
    cancel_after: float | None = None
    timeout: float | None = None
    params: dict[str, Any] = field(default_factory=dict)  # more of SamplingParams
    then: Callable[[list[int]], Ask] | None = None


class Maker:
    """Random numbers and sizes for one scenario. ``n_requests`` and ``rate`` (requests/s; inf: all
    at once) None: what takes about a minute, or ``seconds``, at a good load."""

    def __init__(
        self, speed: Speed, n_ctx: int, n_vocab: int, max_num_seqs: int, seed: int = 0,
        n_requests: int | None = None, rate: float | None = None, seconds: float | None = None,
    ) -> None:  # fmt: skip
        self.speed, self.n_ctx, self.max_num_seqs = speed, n_ctx, max_num_seqs
        self.rng = np.random.default_rng(seed)
        self._first = min(100, n_vocab // 2)  # special tokens come first in vocabularies
        self._n_vocab = n_vocab
        self._n_requests, self._rate, self._seconds = n_requests, rate, seconds
        self.scale = 1.0

    def fit(self, kinds: dict[tuple[str, str], float]) -> tuple[int, float]:
        """(requests, requests/s) for a mix of kinds; sets the scale of lengths: halved until
        enough requests fit into the time, so that the same speed class gets the same lengths."""
        one = sum(share * self.seconds_of(*kind) for kind, share in kinds.items())
        seconds = self._seconds or SECONDS
        wanted = self._n_requests or _LEAST_REQUESTS
        while self.scale > _SMALLEST and wanted * one * self.scale > seconds * _LOAD:
            self.scale /= 2
        one *= self.scale
        rate = self._rate or _LOAD / one
        n = int(seconds * (_LOAD / one if math.isinf(rate) else rate))
        if self._seconds is None:
            n = min(max(int(seconds * _LOAD / one), _LEAST_REQUESTS), _MOST_REQUESTS)
        return self._n_requests or max(n, 1), rate

    def seconds_of(self, prompt: str, answer: str) -> float:
        """Of the machine's time that a request of a kind takes, at full length."""
        n_prompt, n_answer = (sum(of) / 2 * self.n_ctx for of in (PROMPTS[prompt], ANSWERS[answer]))
        return n_prompt / self.speed.prefill + n_answer / self.speed.decode

    def length(self, of: tuple[float, float], least: int) -> int:
        low, high = (share * self.n_ctx * self.scale for share in of)
        return max(least, round(self.rng.uniform(low, high)))

    def tokens(self, n: int) -> list[int]:
        found: list[int] = self.rng.integers(self._first, self._n_vocab, n).tolist()
        return found

    def ask(self, at: float, prompt: str, answer: str, **more: Any) -> Ask:
        n_prompt, n_answer = self.length(PROMPTS[prompt], 4), self.length(ANSWERS[answer], 3)
        kind = more.pop("kind", f"{prompt}/{answer}")
        return Ask(at, self.tokens(n_prompt), n_answer, kind, **more)

    def steady(self, n: int, rate: float) -> list[float]:
        """Arrivals that know nothing of each other (Poisson)."""
        if math.isinf(rate):
            return [0.0] * n
        found: list[float] = np.cumsum(self.rng.exponential(1 / rate, n)).tolist()
        return found

    def kinds(self, n: int) -> list[tuple[str, str]]:
        """Kinds of MIX in a random order; their shares are exact but for rounding."""
        ends = np.round(np.cumsum(list(MIX.values())) * n).astype(int)
        found = [kind for kind, k in zip(MIX, np.diff(ends, prepend=0), strict=True)
                 for _ in range(k)]  # fmt: skip
        return [found[i] for i in self.rng.permutation(n)]

    def mix(self, arrivals: list[float]) -> list[Ask]:
        kinds = self.kinds(len(arrivals))
        return [self.ask(at, *kind) for at, kind in zip(arrivals, kinds, strict=True)]


@dataclass(frozen=True)
class Scenario:
    name: str
    about: str
    make: Callable[[Maker], list[Ask]]


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    name: str, about: str
) -> Callable[[Callable[[Maker], list[Ask]]], Callable[[Maker], list[Ask]]]:
    def put(make: Callable[[Maker], list[Ask]]) -> Callable[[Maker], list[Ask]]:
        SCENARIOS[name] = Scenario(name, about, make)
        return make

    return put


def find(name: str) -> Scenario:
    if name not in SCENARIOS:
        raise EdgeLLMError(f"No scenario {name!r} (--scenario); there are {', '.join(SCENARIOS)}.")
    return SCENARIOS[name]


@scenario("mix", "40 % short prompts and answers, 40 % medium, 20 % long, at random times")
def _mix(maker: Maker) -> list[Ask]:
    return maker.mix(maker.steady(*maker.fit(MIX)))


def _corner(prompt: str, answer: str) -> Callable[[Maker], list[Ask]]:
    def make(maker: Maker) -> list[Ask]:
        n, rate = maker.fit({(prompt, answer): 1.0})
        return [maker.ask(at, prompt, answer) for at in maker.steady(n, rate)]

    return make


for _prompt in ("short", "long"):
    for _answer in ("short", "long"):
        scenario(f"{_prompt}-{_answer}", f"{_prompt} prompts, {_answer} answers")(
            _corner(_prompt, _answer)
        )


def _prefixed(maker: Maker, n_heads: int | None) -> list[Ask]:
    n, rate = maker.fit({("long", "short"): 1.0})
    n_head = max(4, int(3 / 8 * maker.n_ctx * maker.scale))
    heads = [maker.tokens(n_head) for _ in range(n_heads or n)]
    asks = []
    for i, at in enumerate(maker.steady(n, rate)):
        ask = maker.ask(at, "short", "short", kind="prefix")
        head = heads[maker.rng.integers(n_heads)] if n_heads else heads[i]
        asks.append(Ask(at, head + ask.prompt, ask.max_tokens, "prefix"))
    return asks


@scenario("prefix-high", "long prompts that begin like one of three")
def _prefix_high(maker: Maker) -> list[Ask]:
    return _prefixed(maker, 3)


@scenario("prefix-low", "the same lengths, no two prompts begin alike")
def _prefix_low(maker: Maker) -> list[Ask]:
    return _prefixed(maker, None)


@scenario("burst", "the mix in groups of twice as many as there are seats")
def _burst(maker: Maker) -> list[Ask]:
    n, rate = maker.fit(MIX)
    size = 2 * maker.max_num_seqs
    return maker.mix([(i // size) * size / rate for i in range(n)])


@scenario("periodic", "the mix at equal distances")
def _periodic(maker: Maker) -> list[Ask]:
    n, rate = maker.fit(MIX)
    return maker.mix([i / rate for i in range(n)])


@scenario("priorities", "the mix, half of it in the batch lane, a little more than can be done")
def _priorities(maker: Maker) -> list[Ask]:
    n, rate = maker.fit(MIX)
    asks = maker.mix(maker.steady(n, rate if maker._rate else 1.1 * rate / _LOAD))
    for ask in asks:
        ask.priority = ("interactive", "batch")[int(maker.rng.integers(2))]
        ask.kind = ask.priority
    return asks


@scenario("structured", "medium prompts, half of the answers keep to a JSON schema")
def _structured(maker: Maker) -> list[Ask]:
    n, rate = maker.fit({("mid", "mid"): 1.0})
    asks = [maker.ask(at, "mid", "mid", kind="free") for at in maker.steady(n, rate)]
    for ask in asks[::2]:
        # an answer that keeps to the schema ends by itself
        ask.kind, ask.params = "schema", {"json_schema": SCHEMA, "ignore_eos": False}
        ask.max_tokens = max(ask.max_tokens, 80)
    return asks


@scenario("cancel", "the mix; a third is given up on the way, a sixth has a timeout")
def _cancel(maker: Maker) -> list[Ask]:
    n, rate = maker.fit(MIX)
    asks = maker.mix(maker.steady(n, rate))
    for ask, chance in zip(asks, maker.rng.random(len(asks)), strict=True):
        alone = len(ask.prompt) / maker.speed.prefill
        alone += ask.max_tokens * maker.max_num_seqs / maker.speed.decode
        if chance < 1 / 3:
            ask.cancel_after = float(maker.rng.uniform(0, alone))
        elif chance < 1 / 2:
            ask.timeout = float(maker.rng.uniform(0.1, 1) * alone) + 1e-3
    return asks


@scenario("chat5", "chats of five turns behind the same system prompt of 800 tokens")
def _chat5(maker: Maker) -> list[Ask]:
    scale = min(1.0, maker.n_ctx / 2048)
    n_question, n_answer = (max(4, int(scale * n)) for n in (_QUESTION, _ANSWER))
    n_system = int(scale * _SYSTEM)
    system = maker.tokens(n_system)
    per_turn = n_question / maker.speed.prefill + n_answer / maker.speed.decode
    seconds = TURNS * per_turn + n_system / maker.speed.prefill
    # twice, as it is measured without reuse as well, where each turn reads everything
    whole = TURNS * (n_system + 2 * (n_question + n_answer)) / maker.speed.prefill + seconds
    fitting = int((maker._seconds or SECONDS) * _LOAD / whole)
    n = maker._n_requests or max(2, fitting if maker._seconds else min(8, fitting))
    rate = maker._rate or _LOAD / whole
    maker.scale = scale

    def turn(number: int, at: float, history: list[int], questions: list[list[int]]) -> Ask:
        prompt = history + questions[number - 1]

        def then(output: list[int]) -> Ask:
            return turn(number + 1, math.nan, prompt + output, questions)

        more = then if number < TURNS else None
        return Ask(at, prompt, n_answer, f"turn {number}", turn=number, then=more)

    return [
        turn(1, at, system, [maker.tokens(n_question) for _ in range(TURNS)])
        for at in maker.steady(n, rate)
    ]


# ---- interactive requests beside a flood of others ----------------------------------------------


@scenario("flood", "interactive requests alone, and beside more batch requests than can be done")
def _flooded(maker: Maker) -> list[Ask]:
    return flood(maker)["flooded"]


def flood(maker: Maker) -> dict[str, list[Ask]]:
    """Three phases: interactive requests alone; the same beside more batch requests than can be
    done; and more interactive requests than can be done, beside the batch requests."""
    maker.fit({("mid", "short"): 1.0})
    seconds = maker.seconds_of("mid", "short") * maker.scale
    phase = SECONDS / 4
    # a third of the machine's time: a queue of interactive requests is not what is measured
    rate = maker._rate or 0.33 / seconds
    n = maker._n_requests or min(max(20, int(phase * rate)), 40)
    phase = n / rate
    quick = [maker.ask(at, "mid", "short", kind="interactive") for at in maker.steady(n, rate)]
    long = maker.seconds_of("mid", "long") * maker.scale
    n_batch = max(2 * maker.max_num_seqs, math.ceil(1.5 * phase / long))

    def batch() -> list[Ask]:
        return [maker.ask(0.0, "mid", "long", kind="batch", priority="batch")
                for _ in range(n_batch)]  # fmt: skip

    many = math.ceil(1.2 * phase / seconds)
    crowd = [maker.ask(0.0, "mid", "short", kind="interactive") for _ in range(many)]
    return {"alone": quick, "flooded": quick + batch(), "permanent": crowd + batch()}
