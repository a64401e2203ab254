"""Blocks over random schedules: none is lost, none is shared that should not be, and what a prompt
can go on from is the most there is."""

from __future__ import annotations

import random

import pytest
from cache_model import BLOCK, CheckedCache, request
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edgellm.block_pool import BlockPool, Content
from edgellm.host_tier import HostTier
from edgellm.prefix import chain, root
from edgellm.sequence import Sequence

# windows of the groups, slots of states, sinks
KINDS = [
    ([None], 0, 0), ([None, 6], 0, 0), ([7], 0, 0), ([9], 0, 3), ([None], 12, 0), ([5, None], 12, 0)
]  # fmt: skip
SHAPES = st.sampled_from(KINDS)


class Schedules(RuleBasedStateMachine):
    """Requests from a small family of prompts come, compute, go back and go, in any order."""

    @initialize(shape=SHAPES, n_blocks=st.integers(12, 30), tier=st.sampled_from([0, 3, 40]))
    def start(self, shape: tuple[list[int | None], int, int], n_blocks: int, tier: int) -> None:
        windows, n_states, sinks = shape
        self.cache = CheckedCache(windows, n_blocks, 3, n_states=n_states, sinks=sinks, tier=tier)
        self.running: list[Sequence] = []

    @rule(
        length=st.integers(1, 30), branch=st.integers(0, 3), at=st.integers(0, 30),
        salt=st.sampled_from(["", "b"]), marks=st.sets(st.integers(1, 30), max_size=3),
    )  # fmt: skip
    def arrive(self, length: int, branch: int, at: int, salt: str, marks: set[int]) -> None:
        tokens = [i if i < at else 100 * branch + i for i in range(length)]
        sequence = request(tokens, marks, cache_salt=salt)
        if self.cache.kv.fits(length) and self.cache.kv.admit(sequence):
            assert sequence.n_computed < length
            self.running.append(sequence)

    @precondition(lambda self: self.running)
    @rule(which=st.randoms(use_true_random=False), n=st.integers(1, 16))
    def compute(self, which: random.Random, n: int) -> None:
        sequence = which.choice(self.running)
        if sequence.n_waiting == 0:
            sequence.tokens.append(sequence.tokens[-1] + 1)
        n = min(n, sequence.n_waiting)
        if self.cache.kv.extend(sequence, n):
            self.cache.compute(sequence, n)

    @precondition(lambda self: self.running)
    @rule(which=st.randoms(use_true_random=False), share=st.floats(0, 1))
    def rewind(self, which: random.Random, share: float) -> None:
        sequence = which.choice(self.running)
        wanted = int(sequence.n_computed * share)
        pools = [g.pool.n_available for g in self.cache.kv.groups]
        if min(pools) == 0:
            return  # a block that others see could not be copied
        there = self.cache.kv.rewind(sequence, wanted)
        assert there == sequence.n_computed <= max(wanted, 0)
        del sequence.tokens[max(wanted, 1) :]
        sequence.tokens += range(500 + wanted, 507 + wanted)  # another way on

    @precondition(lambda self: self.running and not self.cache.kv.is_recurrent)
    @rule(which=st.randoms(use_true_random=False))
    def fork(self, which: random.Random) -> None:
        sequence = which.choice(self.running)
        other = request(
            [*sequence.tokens[: sequence.n_computed], 900, 901], cache_salt=sequence.salt
        )
        if self.cache.kv.fork(sequence, other):
            assert other.n_computed == sequence.n_computed
            self.running.append(other)

    @precondition(lambda self: self.running)
    @rule(which=st.randoms(use_true_random=False))
    def leave(self, which: random.Random) -> None:
        sequence = which.choice(self.running)
        self.running.remove(sequence)
        self.cache.kv.release(sequence)
        self.cache.kv.release(sequence)

    @rule()
    def start_anew(self) -> None:
        self.cache.kv.start_anew(reuse=True)

    @invariant()
    def accounts_are_right(self) -> None:
        if not hasattr(self, "cache"):
            return
        kv = self.cache.kv
        assert kv.faults() == []
        for i, group in enumerate(kv.groups):
            pool = group.pool
            assert pool.n_held + pool.n_available == group.n_blocks
            assert pool.n_held == len({b for s in self.running for b in s.blocks[i].values()})
        assert kv.is_idle == (not self.running)


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@settings(max_examples=200, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24), min_size=2, max_size=9)
)
def test_a_prompt_goes_on_from_the_longest_common_beginning(prompts: list[list[int]]) -> None:
    """Brute force: with room for all, that is the longest beginning of any earlier prompt."""
    cache = CheckedCache([None], 200, 2)
    done: list[list[int]] = []
    for tokens in prompts:
        sequence = request(tokens)
        assert cache.kv.admit(sequence)
        common = [_common(tokens[:-1], other) for other in done]
        assert sequence.n_computed == max(common, default=0)
        n = sequence.n_waiting
        assert cache.kv.extend(sequence, n)
        cache.compute(sequence, n)
        cache.kv.release(sequence)
        done.append(tokens)


def _common(a: list[int], b: list[int]) -> int:
    different = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(different, min(len(a), len(b)))


def _run(cache: CheckedCache, tokens: list[int], marks: tuple[int, ...] = ()) -> Sequence:
    sequence = request(tokens, marks)
    assert cache.kv.admit(sequence)
    while sequence.n_waiting:
        ends = [len(sequence.tokens), *(m for m in marks if m > sequence.n_computed)]
        n = min(min(ends) - sequence.n_computed, 16)
        assert cache.kv.extend(sequence, n)
        cache.compute(sequence, n)
    return sequence


def test_shared_blocks_are_counted_once() -> None:
    cache = CheckedCache([None], 40, 2)
    tokens = list(range(40))
    first = _run(cache, tokens)
    second = _run(cache, [*tokens, 99])
    held = cache.kv.groups[0].pool.n_held
    assert held == 11  # ten in common and one more
    cache.kv.release(first)
    assert cache.kv.groups[0].pool.n_held == held
    cache.kv.release(second)


def test_prompts_computed_side_by_side_come_to_share() -> None:
    cache = CheckedCache([None], 40, 2)
    pair = [request(list(range(20))) for _ in range(2)]
    for sequence in pair:
        assert cache.kv.admit(sequence) and cache.kv.extend(sequence, 20)
    assert cache.kv.groups[0].pool.n_held == 10
    for sequence in pair:
        cache.compute(sequence, 20)
    assert cache.kv.groups[0].pool.n_held == 5


def test_the_least_recently_used_end_goes_first() -> None:
    cache = CheckedCache([None], 10, 2)
    for start in (0, 100):
        cache.kv.release(_run(cache, list(range(start, start + 20))))
    cache.kv.release(_run(cache, list(range(200, 209))))  # three blocks: of the first, its end
    for start, kept in ((0, 8), (100, 19)):
        again = request(list(range(start, start + 20)))
        assert cache.kv.admit(again)
        assert again.n_computed == kept
        cache.kv.release(again)


def test_a_window_that_moved_on_can_be_gone_back_to() -> None:
    """Its blocks are let go, not overwritten: a prompt that ends there finds them."""
    cache = CheckedCache([8], 30, 2)
    cache.kv.release(_run(cache, list(range(60))))
    for n in (60, 33, 20):
        sequence = request([*range(n), 7777])
        assert cache.kv.admit(sequence) and sequence.n_computed == n
        cache.kv.release(sequence)


def test_a_state_is_gone_on_with_only_where_it_was_kept() -> None:
    cache = CheckedCache([None], 40, 2, n_states=8)
    cache.kv.release(_run(cache, list(range(30)), marks=(9, 22)))
    for n, found in ((31, 30), (30, 22), (25, 22), (22, 9), (10, 9), (9, 0)):
        sequence = request(list(range(n)))
        assert cache.kv.admit(sequence)
        assert sequence.n_computed == found
        cache.kv.release(sequence)
    assert cache.kv.faults() == []


def test_salts_do_not_meet() -> None:
    cache = CheckedCache([None], 40, 2)
    cache.kv.release(_run(cache, list(range(20))))
    other = request(list(range(20)), cache_salt="other")
    assert cache.kv.admit(other) and other.n_computed == 0


def test_a_pool_that_is_just_large_enough_serves_one_prompt_after_the_other() -> None:
    """What an earlier prompt left must never keep a request out that fits alone."""
    for windows in ([None], [6, None]):
        cache = CheckedCache(windows, 8, 1)
        for i in range(40):
            n = 5 + i * 7 % 28
            tokens = [*range(i % 5 * 3), *range(50 * i, 50 * i + n)][:32]
            cache.kv.release(_run(cache, tokens))


@pytest.mark.parametrize("tokens", [(), (1,), tuple(range(BLOCK))])
def test_prefixes_name_all_that_is_before_them(tokens: tuple[int, ...]) -> None:
    assert root("a") != root("b") != root() and root("a") == root("a")
    assert chain(root("a"), tokens) != chain(root("b"), tokens)
    assert chain(root(), tokens) != chain(root(), (*tokens, 0))


def test_an_evicted_block_is_told() -> None:
    told: list[tuple[int, Content]] = []
    pool = BlockPool(1, lambda block, content: told.append((block, content)))
    block = pool.take()
    assert block is not None
    content = Content(root(), (1, 2), b"x")
    pool.register(block, content)
    pool.drop(block)
    assert pool.find(b"x") == block and pool.n_kept == 1
    assert pool.take() == block and told == [(block, content)]
    assert pool.find(b"x") is None and pool.take() is None


def test_a_tier_gives_back_what_a_small_pool_gave_away() -> None:
    cache = CheckedCache([None, 9], 12, 1, tier=100)
    prompts = [list(range(100 * i, 100 * i + 33)) for i in range(5)]
    for turn in range(3):
        for tokens in prompts:
            sequence = request(tokens)
            assert cache.kv.admit(sequence)
            assert sequence.n_computed >= (32 if turn else 0)
            n = sequence.n_waiting
            assert cache.kv.extend(sequence, n)
            cache.compute(sequence, n)
            cache.kv.release(sequence)


def test_a_tier_keeps_to_its_size_and_stops_where_it_does_not_pay() -> None:
    seconds = 1.0
    tier = HostTier(100, lambda g, b: bytes(30), lambda g, b, data: None, lambda: seconds)
    for i in range(10):
        tier.store(0, bytes([i]), i)
        assert tier.n_bytes <= 100
    assert [i for i in range(10) if tier.has(0, bytes([i]))] == [7, 8, 9]
    tier.restore(0, 1, tier.take(0, bytes([8])))
    assert tier.has(0, bytes([9])) and not tier.has(0, bytes([8]))
    seconds = 0.0
    assert not tier.has(0, bytes([9]))
