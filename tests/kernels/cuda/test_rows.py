"""Ops on rows against the specification, each in a launch laid out for more rows than there are."""

import numpy as np
import pytest
from on_device import floats, get, put, rows

from edgellm.kernels import reference
from edgellm.kernels.cuda import operations
from edgellm.kernels.cuda.quantized import row_bytes
from edgellm.kernels.graph import Graph, Rope, Weight, Yarn
from edgellm.kernels.rope import frequencies
from edgellm.quant import by_name

N, LIMIT = 5, 7
F32 = by_name("f32")
POSITIONS = np.array([0, 1, 17, 4095, 131071])


def weight(name: str, *shape: int) -> Weight:
    return Weight(name, F32, shape)


def sample(dim: int, seed: int = 0, n: int = N) -> np.ndarray:
    return (3 * np.random.default_rng(seed).standard_normal((n, dim))).astype(np.float32)


def expected(build, inputs, weights=None, out_rows=None) -> np.ndarray:
    """The specification's output of the op that ``build`` adds to a graph for tensors like
    ``inputs``."""
    graph = Graph()
    build(graph, *(graph.embed(weight("x", x.shape[1], 1)) for x in inputs))
    step = reference.Step(
        np.zeros(N, int), POSITIONS, lambda w: (weights or {})[w.name], out_rows=out_rows
    )
    return reference.evaluate(graph.ops[-1], list(inputs), step)


def check(devices, launch, wanted, tolerance, n=N):
    """``launch(device, out, rows)`` fills the first n rows of out, and no others."""
    dim = wanted.shape[1]
    for device in devices:
        out = put(device, np.full((LIMIT, dim), 7))
        launch(device, out, rows(device, n, LIMIT))
        found = get(device, out, LIMIT, dim)
        np.testing.assert_allclose(found[:n], wanted, rtol=tolerance, atol=tolerance)
        assert (found[n:] == 7).all()


@pytest.mark.parametrize(
    ("dim", "n", "n_rows"), [(576, 576, 1), (2080, 2080, 1), (192, 64, 1), (160, 40, 4)]
)
def test_norms(devices, dim, n, n_rows):
    x, w, b = sample(dim), sample(n, 1, n_rows), sample(n, 2, n_rows)
    weights = {"w": w if n_rows > 1 else w[0], "b": b if n_rows > 1 else b[0]}
    of_w, of_b = (weight(name, *((n, n_rows) if n_rows > 1 else (n,))) for name in "wb")
    wanted = expected(lambda g, t: g.rms_norm(t, of_w, 1e-5), [x], weights)
    check(devices, lambda d, out, r: operations.rms_norm(
        d, put(d, x), put(d, w), out, r, dim, n, 1e-5, n_rows), wanted, 3e-6)  # fmt: skip
    for bias in (None, of_b):
        wanted = expected(lambda g, t, b=bias: g.layer_norm(t, of_w, b, 1e-5), [x], weights)
        check(devices, lambda d, out, r, given=bias: operations.layer_norm(
            d, put(d, x), put(d, w), put(d, b) if given else None, out, r, dim, n, 1e-5, n_rows,
        ), wanted, 3e-6)  # fmt: skip
    wanted = expected(lambda g, t: g.l2_norm(t, n, 1e-6), [x])
    check(devices, lambda d, out, r: operations.l2_norm(d, put(d, x), out, r, dim, n, 1e-6),
          wanted, 3e-6)  # fmt: skip


ROPES = {
    "neox": Rope(64, 10000.0, "neox"),
    "norm, part of a head": Rope(40, 500000.0, "norm"),
    "factors": Rope(64, 10000.0, "neox", factors=weight("factors", 32)),
    "yarn": Rope(64, 10000.0, "norm", freq_scale=0.25, yarn=Yarn(4096), magnitude=1.1),
}


@pytest.mark.parametrize("name", ROPES)
def test_rope(devices, name):
    rope, x = ROPES[name], sample(3 * 64)
    factors = np.random.default_rng(1).uniform(0.5, 8, 32).astype(np.float32)
    wanted = expected(lambda g, t: g.rope(t, 64, rope), [x], {"factors": factors})
    by_pair = frequencies(rope, factors if rope.factors else None)
    n_pairs = rope.dim // 2

    def launch(device, out, r):
        angles = floats(device, LIMIT, n_pairs, 2)
        operations.rope_angles(
            device, put(device, POSITIONS, np.int32), put(device, by_pair, np.float64), angles, r,
            n_pairs, rope.magnitude,
        )  # fmt: skip
        operations.rope(device, put(device, x), angles, out, r, 192, 64, n_pairs, rope.layout)

    check(devices, launch, wanted, 2e-6)


def test_temper(devices):
    x = sample(100)
    wanted = expected(lambda g, t: g.temper(t, 0.1, 1000), [x])
    positions = POSITIONS.astype(np.int32)
    check(devices, lambda d, out, r: operations.temper(
        d, put(d, x), put(d, positions, np.int32), out, r, 100, 0.1, 1000), wanted, 1e-6
    )  # fmt: skip


def test_rows_are_chosen_cut_and_joined(devices):
    x, y, shared = sample(300), sample(90, 1), sample(30, 2)
    picked = np.array([4, 0])
    wanted = expected(lambda g, t: g.select(t), [x], out_rows=picked)
    check(devices, lambda d, out, r: operations.copy_rows(
        d, put(d, x), put(d, picked, np.int32), out, r, 300), wanted, 0, n=2)  # fmt: skip
    for run in (300, 100):
        wanted = expected(lambda g, t, run=run: g.slice(t, 10, 60, run), [x])
        check(devices, lambda d, out, r, run=run: operations.slice_rows(
            d, put(d, x), out, r, 300, 10, 60, run), wanted, 0)  # fmt: skip
    for other, is_shared in ((y, False), (shared, True)):
        wanted = expected(lambda g, a, b, s=is_shared: g.join(a, b, 3, s), [x, other])
        check(devices, lambda d, out, r, other=other, s=is_shared: operations.join(
            d, put(d, x), put(d, other), out, r, 3, 100, 30, s), wanted, 0)  # fmt: skip


EDGES = np.array([0, -0.0, 1e-30, 88, -88, 7, 8, -11, 11, 300, np.inf, np.nan], np.float32)


@pytest.mark.parametrize(
    ("name", "a"), [("scale", 0.3), ("softcap", 30.0), ("sigmoid", 0), ("softplus", 0),
                    ("silu", 0), ("gelu", 0)],
)  # fmt: skip
def test_unary(devices, name, a):
    x = sample(300)
    x[0, : len(EDGES)] = EDGES
    given = [a] if a else []
    with np.errstate(all="ignore"):
        wanted = expected(lambda g, t: getattr(g, name)(t, *given), [x])
    # gelu goes through half: a rounding may fall to the other side
    tolerance = 1e-3 if name == "gelu" else 2e-6
    check(devices, lambda d, out, r: operations.unary(d, name, put(d, x), out, r, 300, a),
          wanted, tolerance)  # fmt: skip


@pytest.mark.parametrize("name", operations.BINARY)
def test_binary(devices, name):
    x, y = sample(300), sample(300, 1)
    x[0, : len(EDGES)], y[0, 50 : 50 + len(EDGES)] = EDGES, EDGES
    with np.errstate(all="ignore"):
        wanted = expected(lambda g, a, b: getattr(g, name)(a, b), [x, y])
    tolerance = 2e-3 if name == "geglu" else 2e-6
    check(devices, lambda d, out, r: operations.binary(d, name, put(d, x), put(d, y), out, r, 300),
          wanted, tolerance)  # fmt: skip


@pytest.mark.parametrize("name", ["add", "mul"])
def test_a_vector_for_all_rows_and_a_number_for_each(devices, name):
    x, vector, column = sample(300), sample(300, 1, 1)[0], sample(1, 2)
    of = {"v": vector}
    wanted = expected(lambda g, t: getattr(g, name)(t, weight("v", 300)), [x], of)
    check(devices, lambda d, out, r: operations.binary(
        d, name, put(d, x), put(d, vector), out, r, 300, "vector"), wanted, 1e-6)  # fmt: skip
    if name == "mul":
        wanted = expected(lambda g, a, b: g.mul(a, b), [x, column])
        check(devices, lambda d, out, r: operations.binary(
            d, name, put(d, x), put(d, column), out, r, 300, "column"), wanted, 1e-6)  # fmt: skip


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("n", [96, 576, 2080])
def test_sum_norm_and_quantizing_at_once_have_the_bits_of_three(devices, n, precise):
    x, y, w = sample(n), sample(n, 1), sample(n, 2, 1)[0]
    size = row_bytes(n, precise)
    for device in devices:
        count = rows(device, N, LIMIT)
        of_x, of_y, weight = put(device, x), put(device, y), put(device, w)
        for other in (None, of_y):
            total, normed, out = (
                of_x,
                floats(device, N, n),
                put(device, np.zeros(N * size), np.uint8),
            )
            if other:
                total = floats(device, N, n)
                operations.binary(device, "add", of_x, other, total, count, n)
            operations.rms_norm(device, total, weight, normed, count, n, n, 1e-5)
            operations.quantize(device, normed, out, count, n, precise)
            wanted = [get(device, b, N, n) for b in (total, normed)]
            found_total, found_normed = floats(device, N, n), floats(device, N, n)
            found = put(device, np.zeros(N * size), np.uint8)
            operations.norm_quantize(
                device, of_x, weight, found, count, n, 1e-5, y=other, total=found_total,
                normed=found_normed, precise=precise,
            )  # fmt: skip
            assert np.array_equal(get(device, found_total, N, n), wanted[0])
            assert np.array_equal(get(device, found_normed, N, n), wanted[1])
            both = [get(device, b, N * size, kind=np.uint8) for b in (out, found)]
            assert np.array_equal(*both)
