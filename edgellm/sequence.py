"""One request on its way: its tokens, how far they are computed, and the text that came out."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from edgellm.request_options import RequestOptions
from edgellm.sampling import Sampler, SamplingParams
from edgellm.stops import StopMatcher

if TYPE_CHECKING:
    from edgellm.cache_report import Known
    from edgellm.tokenizer import StreamDecoder

_numbers = count()
# A token, its log-probability behind those before it (None: it is the first), the likeliest ones.
Score = tuple[int, float | None, list[tuple[int, float]]]


class Progress(NamedTuple):
    """How far a prompt is read: so many of its tokens, ``n_cached`` of them found in the cache,
    ``seconds`` after it was begun."""

    n_prompt: int
    n_cached: int
    n_read: int
    seconds: float


class Piece(NamedTuple):
    """A step of a stream: text to show (may be empty) and its token; the last has a finish_reason.

    ``logprob`` and ``top_logprobs`` are filled when SamplingParams.logprobs asks for them;
    ``choice`` counts the answers to one prompt from 0. While the prompt is read there are pieces
    with ``progress`` alone, when RequestOptions.report_progress asks for them.
    """

    text: str
    token: int | None
    finish_reason: str | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    choice: int = 0
    progress: Progress | None = None


@dataclass(eq=False)
class Sequence:
    """A request, or one of its choices. ``tokens`` are prompt and output; the first ``n_computed``
    are in the cache. ``marks``: after how many tokens a recurrent state is worth keeping. ``forks``
    begin with the same prompt and wait until it is computed. ``scores`` are of the prompt's tokens,
    if ``prompt_logprobs`` asks for them; ``end`` is that of the token that ended the text, which is
    not part of it, if ``logprobs`` does."""

    tokens: list[int]
    params: SamplingParams
    decoder: StreamDecoder
    options: RequestOptions = RequestOptions()
    choice: int = 0
    seed: int | None = None  # None: from params
    marks: frozenset[int] = frozenset()
    forks: list[Sequence] = field(default_factory=list)
    n_prompt: int = field(init=False)
    n_cached: int = 0  # computed for an earlier request that began alike
    finish_reason: str | None = None
    context_full: bool = False
    is_cancelled: bool = False  # may be set by any thread
    n_preempted: int = 0
    n_drafted: int = 0  # guesses that were checked (see speculative)
    n_accepted: int = 0  # and were right
    is_promoted: bool = False  # of the batch lane, but treated as interactive from now on
    known: Known | None = None  # since it was begun: what its prompt may be compared with
    pieces: deque[Piece] = field(default_factory=deque)  # not yet taken by the caller
    scores: list[Score] = field(default_factory=list)
    end: Score | None = None
    # what the cache knows of it while it runs
    n_computed: int = 0
    n_registered: int = 0  # full blocks that others can find
    is_private: bool = False  # what it computes is not for others
    n_room: int = 0  # positions that have a block
    row: int = -1  # of the block tables
    state: int = -1  # slot of the state of recurrent layers
    n_again: int = 0  # tokens behind it that were computed once, but are again after a wrong draft
    blocks: list[dict[int, int]] = field(default_factory=list)  # by cache group: place -> block
    root: bytes = b""  # the name of the empty beginning (see prefix)
    prefixes: list[bytes] = field(default_factory=list)  # names of its first 1, 2, … blocks

    def __post_init__(self) -> None:
        self.number = next(_numbers)
        self.n_prompt = len(self.tokens)
        if self.seed is None:
            self.seed = self.params.resolved_seed()
        # the engine adds what a model knows
        self.sampler = Sampler(self.params, self.seed, choice=self.choice)
        self.error: Exception | None = None
        if self.is_scored:
            self.scores.append((self.tokens[0], None, []))
        self.stops = StopMatcher(self.params.stop)
        self.arrived = time.perf_counter()
        self.started = self.first_token = self.last_token = self.finished = 0.0

    def raise_error(self) -> None:
        """Raise what ended the request, if an error did."""
        if self.error is not None:
            raise self.error

    @property
    def salt(self) -> str:
        return self.options.cache_salt

    @property
    def lane(self) -> int:
        """0 goes first."""
        return 0 if self.is_promoted else self.options.lane

    @property
    def progress(self) -> Progress:
        """How far its prompt is read now."""
        n_read = min(self.n_computed, self.n_prompt)
        return Progress(self.n_prompt, self.n_cached, n_read, time.perf_counter() - self.started)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.n_prompt :]

    @property
    def is_scored(self) -> bool:
        """Whether its prompt is scored, so that all of it has to be computed: once, for all choices
        of a request."""
        return self.params.prompt_logprobs is not None and self.choice == 0

    @property
    def wants_scores(self) -> bool:
        """Whether some are missing: then a step brings the logits behind all its tokens."""
        return self.is_scored and len(self.scores) < self.n_prompt

    @property
    def n_best(self) -> int:
        """How many of the largest logits a step has to bring for it; 0: all of them."""
        is_reported = self.wants_scores or self.params.logprobs
        return 0 if is_reported else self.sampler.n_best

    @property
    def n_waiting(self) -> int:
        """Tokens that are known but not yet computed."""
        return len(self.tokens) - self.n_computed

    @property
    def is_generating(self) -> bool:
        """Whether its next step brings a new token, and nothing else is to be read."""
        return self.n_waiting == 1 + self.n_again

    @property
    def is_resting(self) -> bool:
        """Whether its reader is too far behind for more to be computed."""
        most = self.options.most_pieces
        return most is not None and len(self.pieces) >= most

    def cancel(self) -> None:
        """Ask for the end of the request, from any thread; the scheduler sees it before its next
        step."""
        self.is_cancelled = True

    def timings(self) -> dict[str, float]:
        """llama.cpp's names; times in milliseconds."""
        n_output = len(self.tokens) - self.n_prompt
        prompt_ms = 1e3 * (self.first_token - self.started) if self.first_token else 0.0
        predicted_ms = 1e3 * (self.finished - self.first_token) if self.finished else 0.0
        # the first token comes with the prompt's last step, so its time is counted there
        n_steps, n_read = max(0, n_output - 1), self.n_prompt - self.n_cached
        return {
            "cache_n": self.n_cached,
            "prompt_n": n_read,
            "prompt_ms": prompt_ms,
            "prompt_per_second": 1e3 * n_read / prompt_ms if prompt_ms else 0.0,
            "predicted_n": n_output,
            "predicted_ms": predicted_ms,
            "predicted_per_second": 1e3 * n_steps / predicted_ms if predicted_ms else 0.0,
            "draft_n": self.n_drafted,
            "draft_n_accepted": self.n_accepted,
        }


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished request. ``logprobs``: for each token its log-probability and the best
    alternatives [(token, log-probability)], ``prompt_logprobs``: the scores of the prompt's tokens;
    when asked for."""

    text: str
    tokens: list[int]
    finish_reason: str  # "stop": end token or stop string; "length": max_tokens or full context;
    # "abort": cancelled
    timings: dict[str, float]
    logprobs: list[tuple[float, tuple[tuple[int, float], ...]]] | None = None
    context_full: bool = False
    n_prompt: int = 0
    n_cached: int = 0  # of these, computed for an earlier request
    known: Known | None = None  # what its prompt may be compared with
    prompt_logprobs: list[Score] | None = None


def completion_of(sequence: Sequence) -> Completion:
    """What a finished request comes to; its pieces must not have been taken."""
    pieces = list(sequence.pieces)
    logprobs = None
    if sequence.params.logprobs:
        logprobs = [(p.logprob or 0.0, p.top_logprobs) for p in pieces if p.token is not None]
    return Completion(
        "".join(p.text for p in pieces), sequence.output, sequence.finish_reason or "error",
        sequence.timings(), logprobs, sequence.context_full, sequence.n_prompt, sequence.n_cached,
        sequence.known, list(sequence.scores) if sequence.is_scored else None,
    )  # fmt: skip
