"""Mixtures of experts against the specification and dequantized weights."""

import numpy as np
import pytest
from on_device import as_taken, floats, get, matrix, put, rows
from test_linear import close, weights_of

from edgellm.kernels import reference
from edgellm.kernels.cuda import experts, operations
from edgellm.kernels.graph import Graph, Weight
from edgellm.quant import by_name

ROUTES = {
    "softmax": {"n_used": 2, "normalize": False},
    "normalized": {"n_used": 8, "normalize": True, "scale": 2.5},
    "sigmoid with a bias": {"n_used": 3, "normalize": True, "gating": "sigmoid", "bias": True},
    "groups": {"n_used": 4, "normalize": False, "n_groups": 8, "n_groups_used": 3},
    "groups with a bias": {"n_used": 6, "normalize": True, "gating": "sigmoid", "bias": True,
                           "n_groups": 8, "n_groups_used": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", ROUTES)
def test_route(devices, name):
    n, n_experts, how = 9, 64, dict(ROUTES[name])
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((n, n_experts)).astype(np.float32) * 3
    logits[1] = 1.0  # all tie
    logits[2, 10:20] = logits[2].max() + 1
    bias = rng.standard_normal(n_experts).astype(np.float32) if how.pop("bias", False) else None
    graph = Graph()
    x = graph.embed(Weight("x", by_name("f32"), (n_experts, 1)))
    of = None if bias is None else Weight("bias", by_name("f32"), (n_experts,))
    graph.moe_route(x, bias=of, **how)
    step = reference.Step(np.zeros(n, int), np.arange(n), lambda w: bias)
    wanted = reference.evaluate(graph.ops[-1], [logits], step)
    n_used = how.pop("n_used")
    for device in devices:
        out = put(device, np.full((n + 1, 2 * n_used), -7))
        given = None if bias is None else put(device, bias)
        experts.moe_route(
            device, put(device, logits), out, rows(device, n, n + 1), n_experts, n_used,
            bias=given, **how,
        )  # fmt: skip
        found = get(device, out, n + 1, 2 * n_used)
        assert np.array_equal(found[:n, :n_used], wanted[:, :n_used])
        np.testing.assert_allclose(found[:n, n_used:], wanted[:, n_used:], rtol=3e-6)
        assert (found[n:] == -7).all()


def test_a_route_of_nan_names_experts_that_there_are(devices):
    logits = np.full((2, 16), np.nan, np.float32)
    logits[1, 3] = 1
    for device in devices:
        out = floats(device, 2, 8)
        experts.moe_route(
            device, put(device, logits), out, rows(device, 2), 16, 4, normalize=True
        )  # fmt: skip
        ids = get(device, out, 2, 8)[:, :4]
        assert ids.tolist() == [[0, 1, 2, 3], [3, 0, 1, 2]]


def random_route(n, n_used, n_experts, seed) -> np.ndarray:
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(n_experts)[:n_used] for _ in range(n)])
    return np.concatenate([ids, rng.random((n, n_used))], axis=1).astype(np.float32)


@pytest.mark.parametrize("per_rank", [False, True])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("kind", ["q4_k", "q6_k", "mxfp4", "q8_0", "f16"])
def test_rows_times_their_experts(devices, kind, phase, per_rank):
    n, n_used, n_experts, n_in, n_out = 3 if phase == "decode" else 70, 3, 5, 256, 37
    parts = [weights_of(kind, n_out, n_in, seed) for seed in range(n_experts)]
    rng = np.random.default_rng(2)
    x = rng.standard_normal((n, n_in * (n_used if per_rank else 1)), np.float32)
    bias = rng.standard_normal((n_experts, n_out), np.float32)
    route = random_route(n, n_used, n_experts, 3)
    ids = route[:, :n_used].astype(int)
    for device in devices:
        w, count = matrix(device, kind, [p for p, _ in parts], n_in), rows(device, n, n + 1)
        taken, seen = as_taken(device, w, x, count)
        on_device, groups = put(device, route), None
        if phase == "prefill":
            groups = experts.Groups(device.alloc(4 * n * n_used), device.alloc(4 * n_experts + 4))
            experts.group_pairs(device, on_device, groups, count, n_used, n_experts)
        out = floats(device, n + 1, n_used * n_out)
        experts.moe_linear(
            device, w, taken, on_device, out, count, phase, n_used, per_rank, groups,
            put(device, bias),
        )  # fmt: skip
        found = get(device, out, n + 1, n_used, n_out)
        seen = np.broadcast_to(seen.reshape(n, -1, n_in), (n, n_used, n_in))
        numbers = np.stack([p for _, p in parts])[ids]  # [n, n_used, n_out, n_in]
        expected = np.einsum("nrk,nrok->nro", seen, numbers) + bias[ids]
        sizes = np.einsum("nrk,nrok->nro", np.abs(seen), np.abs(numbers)) + np.abs(bias[ids])
        assert close(found[:n], expected, sizes)
        assert np.isnan(found[n:]).all()


def test_pairs_are_grouped_in_order(devices):
    n, n_used, n_experts = 300, 4, 40
    route = random_route(n, n_used, n_experts, 4)
    ids = route[:, :n_used].astype(int).reshape(-1)
    for device in devices:
        groups = experts.Groups(device.alloc(4 * n * n_used), device.alloc(4 * n_experts + 4))
        experts.group_pairs(
            device, put(device, route), groups, rows(device, n), n_used, n_experts
        )  # fmt: skip
        order = get(device, groups.order, n * n_used, kind=np.int32)
        starts = get(device, groups.starts, n_experts + 1, kind=np.int32)
        assert np.array_equal(order, np.argsort(ids, kind="stable"))
        assert np.array_equal(np.diff(starts), np.bincount(ids, minlength=n_experts))


def test_sum(devices):
    n, n_used, dim = 4, 3, 300
    rng = np.random.default_rng(5)
    x, route = rng.standard_normal((n, n_used * dim), np.float32), random_route(n, n_used, 8, 6)
    wanted = (x.reshape(n, n_used, dim) * route[:, n_used:, None].astype(np.float64)).sum(1)
    for device in devices:
        out = floats(device, n, dim)
        experts.moe_sum(
            device, put(device, x), put(device, route), out, rows(device, n), dim, n_used
        )  # fmt: skip
        np.testing.assert_allclose(get(device, out, n, dim), wanted, atol=1e-6)


def test_a_gate_at_once_has_the_bits_of_one_after_the_other(devices):
    n, n_used, n_experts, n_in, n_out = 3, 2, 4, 256, 9
    parts = [[weights_of("mxfp4", n_out, n_in, s + e)[0] for e in range(n_experts)] for s in (0, 9)]
    rng, route = np.random.default_rng(7), random_route(n, n_used, n_experts, 8)
    x, bias = rng.standard_normal((n, n_in), np.float32), rng.standard_normal((n_experts, n_out))
    for device in devices:
        gate, up = (matrix(device, "mxfp4", p, n_in) for p in parts)
        count, on_device, of = rows(device, n), put(device, route), put(device, bias)
        taken, _ = as_taken(device, gate, x, count)
        both = [floats(device, n, n_used * n_out) for _ in range(3)]
        for w, to in zip((gate, up), both, strict=False):
            experts.moe_linear(
                device, w, taken, on_device, to, count, "decode", n_used, False, None, of
            )  # fmt: skip
        operations.binary(device, "swiglu_clamped", *both, count, n_used * n_out)
        out = floats(device, n, n_used * n_out)
        experts.moe_gated(
            device, "swiglu_clamped", gate, up, taken, on_device, out, count, n_used, of, of
        )  # fmt: skip
        wanted = get(device, both[2], n, n_used * n_out)
        assert np.array_equal(get(device, out, n, n_used * n_out), wanted)
