"""Attention over a cache in shuffled blocks against the specification (kernels/reference.py)."""

import numpy as np
import pytest
from on_device import floats, get, put, rows

from edgellm.kernels import reference
from edgellm.kernels.cuda import operations
from edgellm.kernels.cuda.attention import (
    PIECE,
    TILE,
    Seen,
    Shape,
    attention,
    kv_store,
    rope_store,
)
from edgellm.kernels.graph import Graph, Weight
from edgellm.quant import by_name

TOLERANCE = 2e-5  # of values of size 1: expf and float32 sums over some hundred keys


def expected(shape, q, k, v, *, causal=True, sinks=None, first=0) -> np.ndarray:
    """By the specification: queries of one sequence from position ``first`` on."""
    graph = Graph()
    parts = [graph.embed(Weight(n, by_name("f32"), (x.shape[1], 1))) for n, x in
             (("q", q), ("k", k), ("v", v))]  # fmt: skip
    weight = None if sinks is None else Weight("sinks", by_name("f32"), (shape.n_heads,))
    graph.attention(
        *parts, n_heads=shape.n_heads, n_kv_heads=shape.n_kv_heads, scale=shape.scale,
        window=shape.window, softcap=shape.softcap, sinks=weight, causal=causal,
    )  # fmt: skip
    n = len(q)
    step = reference.Step(
        np.zeros(n, int), np.arange(first, first + n), lambda weight: sinks, type_k=shape.k_type,
        type_v=shape.v_type,
    )  # fmt: skip
    return reference.evaluate(graph.ops[-1], [q, k, v], step)


class Cache:
    """Sequences in blocks that lie in no order."""

    def __init__(self, device, shape, lengths, block=TILE, seed=0):
        rng = np.random.default_rng(seed)
        n_blocks = [-(-n // block) for n in lengths]
        order = rng.permutation(sum(n_blocks)).astype(np.int32)
        self.device, self.shape, self.block = device, shape, block
        self.table = np.zeros((len(lengths), max(n_blocks) + 1), np.int32)
        for i, n in enumerate(n_blocks):
            self.table[i, :n], order = order[:n], order[n:]
        tiles = sum(n_blocks) * block // TILE
        self.keys = device.alloc(tiles * shape.key_tile_bytes)
        self.values = device.alloc(tiles * shape.value_tile_bytes)

    def slots(self, sequence, positions):
        return self.table[sequence, positions // self.block] * self.block + positions % self.block

    def store(self, sequence, k, v):
        slots = self.slots(sequence, np.arange(len(k)))
        d, n = self.device, rows(self.device, len(k))
        at = put(d, slots, np.int32)
        kv_store(d, self.shape, put(d, k), put(d, v), self.keys, self.values, at, n)

    def attend(
        self, q, positions, sequences, phase, *, last=None, sinks=None, limit=None, n_ctx=None
    ):  # noqa: E501
        d, shape, n = self.device, self.shape, len(q)
        limit, n_ctx = limit or n, n_ctx or int(np.max(positions)) + 1
        seen = Seen(
            put(d, positions, np.int32), put(d, positions if last is None else last, np.int32),
            put(d, self.table, np.int32), put(d, sequences, np.int32), self.table.shape[1],
            self.block,
        )  # fmt: skip
        out = floats(d, limit, shape.n_heads * shape.v_dim)
        partials = d.alloc(shape.partial_bytes(limit, n_ctx)) if phase == "decode" else None
        attention(
            d, shape, put(d, q), self.keys, self.values, out, seen, rows(d, n, limit), phase,
            partials, n_ctx, None if sinks is None else put(d, sinks),
        )  # fmt: skip
        return get(d, out, limit, shape.n_heads * shape.v_dim)[:n]


def random_tokens(shape, n, seed):
    rng = np.random.default_rng(seed)
    dims = (shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim,
            shape.n_kv_heads * shape.v_dim)  # fmt: skip
    return tuple(rng.standard_normal((n, dim), np.float32) for dim in dims)


SHAPES = {
    "GQA": Shape(8, 2, 64, 64, 0.125),
    "12 heads share": Shape(12, 1, 32, 32, 0.2),
    "softcap": Shape(4, 4, 32, 32, 0.3, softcap=5.0),
    "window": Shape(4, 2, 64, 64, 0.125, window=40),
    "wide window": Shape(2, 1, 32, 32, 0.2, window=300),
    "odd heads": Shape(3, 3, 40, 40, 0.15),
    "MLA": Shape(4, 1, 96, 64, 0.1),
    "long heads": Shape(2, 1, 256, 256, 0.06),
}


@pytest.mark.parametrize("name", SHAPES)
def test_both_phases_are_the_specification(devices, name):
    shape, n = SHAPES[name], PIECE + 75
    q, k, v = random_tokens(shape, n, 1)
    wanted = expected(shape, q, k, v)
    some = np.array([0, 3, 31, 32, 100, PIECE - 1, PIECE, n - 1])
    for device in devices:
        cache = Cache(device, shape, [n], block=64)
        cache.store(0, k, v)
        whole = cache.attend(q[:90], np.arange(90), [0], "prefill")
        assert np.abs(whole - wanted[:90]).max() < TOLERANCE
        end = cache.attend(q[-20:], np.arange(n - 20, n), [0], "prefill")
        assert np.abs(end - wanted[-20:]).max() < TOLERANCE
        single = cache.attend(q[some], some, np.zeros(len(some)), "decode", limit=9, n_ctx=700)
        assert np.abs(single - wanted[some]).max() < TOLERANCE
        assert np.array_equal(single[1], whole[3]) and np.array_equal(single[-1], end[-1])


@pytest.mark.parametrize("k_type", ["f32", "f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("v_type", ["f32", "f16", "q8_0", "q4_0"])
def test_every_pair_of_types(devices, k_type, v_type):
    shape = Shape(4, 2, 64, 32, 0.125, k_type=k_type, v_type=v_type)
    q, k, v = random_tokens(shape, 70, 2)
    k[5, :32] = 0  # a group without a largest element
    wanted = expected(shape, q, k, v)
    for device in devices[:1] if k_type != v_type else devices:
        cache = Cache(device, shape, [70])
        cache.store(0, k, v)
        found = cache.attend(q, np.arange(70), [0], "prefill")
        assert np.abs(found - wanted).max() < TOLERANCE
        found = cache.attend(q[60:], np.arange(60, 70), np.zeros(10), "decode")
        assert np.abs(found - wanted[60:]).max() < TOLERANCE


def test_sequences_beside_each_other_and_learned_sinks(devices):
    shape = Shape(4, 2, 32, 32, 0.2, window=50)
    lengths = [70, 1, 33]
    tokens = [random_tokens(shape, n, 10 + n) for n in lengths]
    sinks = np.array([0.5, -1, 3, 0], np.float32)
    for device in devices:
        cache = Cache(device, shape, lengths)
        for i, (_, k, v) in enumerate(tokens):
            cache.store(i, k, v)
        q = np.stack([q[-1] for q, _, _ in tokens])
        positions = np.array(lengths) - 1
        found = cache.attend(q, positions, [0, 1, 2], "decode", sinks=sinks)
        for i, (q_all, k, v) in enumerate(tokens):
            wanted = expected(shape, q_all, k, v, sinks=sinks)
            assert np.abs(found[i] - wanted[-1]).max() < TOLERANCE
            alone = cache.attend(q[i : i + 1], positions[i : i + 1], [i], "decode", sinks=sinks)
            assert np.array_equal(alone[0], found[i])
            whole = cache.attend(q_all, np.arange(len(q_all)), [i], "prefill", sinks=sinks)
            assert np.abs(whole - wanted).max() < TOLERANCE


def test_a_long_context_has_more_pieces_than_blocks(devices):
    shape, n = Shape(1, 1, 8, 8, 0.3), 33 * PIECE + 20
    q, k, v = random_tokens(shape, n, 6)
    wanted = expected(shape, q[-1:], k, v, first=n - 1)
    device = devices[0]
    cache = Cache(device, shape, [n])
    cache.store(0, k, v)
    found = cache.attend(q[-1:], np.array([n - 1]), [0], "decode")
    whole = cache.attend(q[-1:], np.array([n - 1]), [0], "prefill")
    assert np.abs(found - wanted).max() < TOLERANCE and np.array_equal(found, whole)


def test_encoders_see_all_of_their_sequence(devices):
    shape = Shape(2, 2, 32, 32, 0.2)
    q, k, v = random_tokens(shape, 45, 3)
    wanted = expected(shape, q, k, v, causal=False)
    for device in devices:
        cache = Cache(device, shape, [45])
        cache.store(0, k, v)
        found = cache.attend(q, np.arange(45), [0], "prefill", last=np.full(45, 44))
        assert np.abs(found - wanted).max() < TOLERANCE


def test_nan_stays_with_those_who_see_it(devices):
    shape = Shape(2, 1, 32, 32, 0.2)
    for kind in ("f16", "q8_0", "q4_0"):
        shape = Shape(2, 1, 32, 32, 0.2, k_type=kind, v_type=kind)
        q, k, v = random_tokens(shape, 40, 4)
        wanted = expected(shape, q, k, v)
        k[20, 3], v[30, 5] = np.nan, np.inf
        for device in devices:
            cache = Cache(device, shape, [40])
            cache.store(0, k, v)
            for phase, sequences in (("prefill", [0]), ("decode", np.zeros(40))):
                found = cache.attend(q, np.arange(40), sequences, phase)
                assert np.abs(found[:20] - wanted[:20]).max() < TOLERANCE
                assert np.isnan(found[20:]).all(axis=1).all()


def test_slots_below_zero_are_not_written(devices):
    shape = Shape(1, 1, 32, 32, 0.2)
    for device in devices:
        cache = Cache(device, shape, [32])
        before = get(device, cache.keys, cache.keys.n_bytes, kind=np.uint8)
        n, at = rows(device, 2), put(device, [-1, -1], np.int32)
        x = put(device, np.ones((2, 32)))
        kv_store(device, shape, x, x, cache.keys, cache.values, at, n)
        assert np.array_equal(get(device, cache.keys, len(before), kind=np.uint8), before)


def test_heads_without_kernels_are_refused():
    with pytest.raises(ValueError, match="multiples of 8, not 20"):
        Shape(1, 1, 20, 32, 1.0)
    with pytest.raises(ValueError, match="q8_0 needs heads that are multiples of 32, not 40"):
        Shape(1, 1, 32, 40, 1.0, v_type="q8_0")


@pytest.mark.parametrize("layout", ["neox", "norm"])
@pytest.mark.parametrize(("head_dim", "n_pairs"), [(64, 32), (80, 20)])
def test_turned_on_the_way_has_the_bits_of_turned_before(devices, layout, head_dim, n_pairs):
    shape, n = Shape(4, 2, head_dim, 32, 0.1), 6
    q, k, v = random_tokens(shape, n, 7)
    angle = np.random.default_rng(8).standard_normal((n, n_pairs))
    for device in devices:
        count, of = rows(device, n), [put(device, x) for x in (q, k, v)]
        angles = put(device, np.stack([np.cos(angle), np.sin(angle)], axis=-1))
        slots = put(device, np.arange(n) * 3, np.int32)
        pools = [
            [put(device, np.zeros(shape_bytes), np.uint8) for shape_bytes in
             (shape.key_tile_bytes, shape.value_tile_bytes)] for _ in range(2)
        ]  # fmt: skip
        turned = [floats(device, *x.shape) for x in (q, k, q)]
        for x, out, heads in ((of[0], turned[0], 4), (of[1], turned[1], 2)):
            operations.rope(
                device, x, angles, out, count, heads * head_dim, head_dim, n_pairs, layout
            )  # fmt: skip
        kv_store(device, shape, turned[1], of[2], *pools[0], slots, count)
        rope_store(
            device, shape, *of, angles, turned[2], *pools[1], slots, count, n_pairs, layout
        )  # fmt: skip
        assert np.array_equal(get(device, turned[0], *q.shape), get(device, turned[2], *q.shape))
        for a, b in zip(*pools, strict=True):
            both = [get(device, x, x.n_bytes, kind=np.uint8) for x in (a, b)]
            assert np.array_equal(*both)
