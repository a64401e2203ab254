"""Guessing beside the engine's loop: which guesses the next step checks, and what came of them."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass

from edgellm.sequence import Sequence
from edgellm.speculative.acceptance import Acceptance
from edgellm.speculative.controller import allocate
from edgellm.speculative.options import SpeculationOptions
from edgellm.speculative.proposer import Proposal, Proposer, Wanted
from edgellm.speculative.statistics import SpeculationCounts
from edgellm.step_time import StepTime

_MOST_AGAIN = (
    7  # rows that a recurrent model computes once more before it stops guessing for a step
)


@dataclass(frozen=True)
class _Offer:
    """A proposal, of which ``n_checked`` guesses are checked, behind ``n_before`` tokens."""

    proposal: Proposal
    n_before: int
    n_checked: int


class Speculation:
    """Asks ``proposers`` in turn: the first that has something worth checking is heard, unless a
    later one promises more.

    ``max_positions``: where sequences end, ``ends``: tokens that end a text, ``is_recurrent``:
    whether a wrong guess makes its step's tokens be computed again.
    """

    def __init__(
        self, proposers: List[Proposer], options: SpeculationOptions, step_time: StepTime,
        max_positions: int, counts: SpeculationCounts, is_recurrent: bool = False,
    ) -> None:  # fmt: skip
        self.counts = counts
        self.proposers, self._options, self._time = proposers, options, step_time
        self._max_positions, self._is_recurrent = max_positions, is_recurrent
        self._all = {p.name: Acceptance(p.first_rates, p.first_mean) for p in proposers}
        self._own: dict[Sequence, dict[str, Acceptance]] = {}
        self._offers: dict[Sequence, _Offer] = {}
        self.ends: frozenset[int] = frozenset()

    # ---- before a step --------------------------------------------------------------------------

    def plan(
        self, sequences: Iterable[Sequence], n_rows: int, n_prefill: int, room: int
    ) -> dict[Sequence, Proposal]:
        """The guesses that a step checks for sequences that generate. Without them it has
        ``n_rows`` generated rows and ``n_prefill`` of prompts, and room for so many more."""
        self._offers.clear()
        open_to = {s: n for s in sequences if (n := self._most(s)) > 0}
        chosen: dict[Sequence, _Offer] = {}
        for proposer in self.proposers:
            wanted = {
                s: use
                for s, use in self._wanted(open_to, proposer, n_rows, n_prefill).items()
                if s not in chosen or proposer.outlook(s, use) > self._worth(s, chosen[s], use)
            }
            n_others = sum(o.n_checked for s, o in chosen.items() if s not in wanted)
            offers = {s: self._allowed(s, p) for s, p in proposer.propose(wanted).items()}
            offers = {s: p for s, p in offers.items() if p}
            counts = self._count(offers, n_rows + n_others, n_prefill, room - n_others)
            for (sequence, proposal), n in zip(offers.items(), counts, strict=True):
                offer = _Offer(proposal, len(sequence.tokens), n)
                if n:
                    chosen[sequence] = offer
                elif sequence not in chosen:
                    self._offers[sequence] = offer
                    self.counts.declined += 1
        found: dict[Sequence, Proposal] = {}
        for sequence, offer in chosen.items():
            if offer.n_checked <= room:
                self._offers[sequence] = offer
                found[sequence] = offer.proposal.cut(offer.n_checked)
                room -= offer.n_checked
        return found

    def _worth(self, sequence: Sequence, offer: _Offer, use: Wanted) -> float:
        """How many times as fast an offer is likely to make a sequence."""
        proposal = offer.proposal.cut(offer.n_checked)
        gains = self._rates(sequence, proposal.source).gains(proposal.signals)
        seconds = use.step_seconds + offer.n_checked * use.row_seconds
        return (1 + sum(gains)) * use.step_seconds / max(seconds, 1e-9)

    def _wanted(
        self, open_to: dict[Sequence, int], proposer: Proposer, n_rows: int, n_prefill: int
    ) -> dict[Sequence, Wanted]:
        step = self._time.decode(n_rows) + n_prefill * self._time.token_seconds
        row = self._time.decode(n_rows + 4 * len(open_to)) - self._time.decode(n_rows)
        row = self._time.token_seconds if n_prefill else max(0.0, row / (4 * len(open_to) or 1))
        return {s: Wanted(n, self._rates(s, proposer.name), step, row) for s, n in open_to.items()}

    def _most(self, sequence: Sequence) -> int:
        """Guesses that could be of use: behind the last comes a token that needs none."""
        params, n_tokens = sequence.params, len(sequence.tokens)
        if not sequence.options.speculate:
            return 0
        most = min(self._options.n_max, self._max_positions - n_tokens - 1)
        if params.max_tokens is not None:
            most = min(most, params.max_tokens - (n_tokens - sequence.n_prompt) - 1)
        if sequence.n_again:
            most = min(most, _MOST_AGAIN - sequence.n_again)
        return most

    def _allowed(self, sequence: Sequence, proposal: Proposal) -> Proposal:
        """What of it could come: not what a grammar forbids, nor anything from an end on."""
        tokens, params = proposal.tokens, sequence.params
        if params.structured or not params.ignore_eos:
            end = next((i for i, token in enumerate(tokens) if token in self.ends), len(tokens))
            proposal = proposal.cut(end)
        return proposal.cut(sequence.sampler.n_allowed(proposal.tokens))

    def _count(
        self, offers: dict[Sequence, Proposal], n_rows: int, n_prefill: int, room: int
    ) -> list[int]:
        """How many guesses of each offer to check."""
        if not offers:
            return []
        gains = [self._rates(s, p.source).gains(p.signals) for s, p in offers.items()]
        weight = 2 if self._is_recurrent else 1  # a wrong guess's rows come again

        def seconds(n_guesses: int) -> float:
            if n_prefill:  # it is bound by arithmetic, so a row takes as long as any other
                return self._time.decode(n_rows) + self._time.token_seconds * (
                    n_prefill + weight * n_guesses
                )
            return self._time.decode(n_rows + weight * n_guesses)

        counts = allocate(gains, seconds, room)
        return [n if n >= self._options.n_min else 0 for n in counts]

    def _rates(self, sequence: Sequence, source: str) -> Acceptance:
        own = self._own.setdefault(sequence, {})
        if source not in own:
            own[source] = self._all[source].of_sequence()
        return own[source]

    # ---- after it -------------------------------------------------------------------------------

    def learn(self, sequence: Sequence) -> None:
        """New tokens have come: were they what was offered? Offers that were not checked are
        judged too, so that guessing begins again when it pays again."""
        offer = self._offers.pop(sequence, None)
        if offer is None:
            return
        proposal, own = offer.proposal, self._rates(sequence, offer.proposal.source)
        came = sequence.tokens[offer.n_before :]
        n_right = 0
        for token, guess, signal in zip(came, proposal.tokens, proposal.signals, strict=False):
            is_right = token == guess
            n_right += is_right
            for rates in (own, self._all[proposal.source]):
                rates.observe(signal, is_right)
            if not is_right:
                break
        if offer.n_checked:
            n_accepted = min(n_right, offer.n_checked)
            sequence.n_drafted += offer.n_checked
            sequence.n_accepted += n_accepted
            self.counts.checked(proposal.source, offer.n_checked, n_accepted)

    def account(self, n_rows: int, n_tokens: int, n_sequences: int, seconds: float) -> None:
        """A step of ``n_rows`` generated rows brought ``n_tokens`` to ``n_sequences`` in so many
        seconds: what that saved."""
        if n_rows > n_sequences:
            plain = self._time.decode(n_sequences)
            self.counts.saved_seconds += plain * n_tokens / n_sequences - seconds

    def forget(self, sequence: Sequence) -> None:
        """It is over."""
        self.learn(sequence)
        self._own.pop(sequence, None)
        for proposer in self.proposers:
            proposer.forget(sequence)

    @property
    def is_alive(self) -> bool:
        """False once a draft model cannot go on: then no step can be planned."""
        return all(proposer.is_alive for proposer in self.proposers)

    @property
    def lost_device(self) -> str:
        """The name of a GPU that failed under a draft model, or empty."""
        return next(filter(None, (p.lost_device for p in self.proposers)), "")

    def close(self) -> None:
        for proposer in self.proposers:
            proposer.close()
