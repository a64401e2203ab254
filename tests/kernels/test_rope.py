"""Each way to turn queries and keys, against numpy written from its paper."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import architectures
import numpy as np
import pytest
from numpy.typing import NDArray

from edgellm.kernels.graph import Graph, Rope, Weight, Yarn
from edgellm.kernels.reference import Step, evaluate
from edgellm.kernels.rope import RopeTable
from edgellm.models import build_graph
from edgellm.quant import by_name
from edgellm.quant.gguf import GGUF

Array = NDArray[np.float64]
DIM, BASE, HEAD = 16, 10000.0, 24
POSITIONS = np.array([0, 1, 2, 17, 255, 256, 300])


def no_factors(weight: Weight) -> NDArray[np.float32]:
    raise AssertionError("no factors are asked for")


def turned(rope: Rope, x: Array, load: Callable[[Weight], NDArray[np.float32]] = no_factors,
           n_ctx: int = 512) -> Array:  # fmt: skip
    """The op on heads [n, HEAD], by the reference."""
    g = Graph()
    g.rope(g.embed(Weight("x", by_name("f32"), (HEAD, len(x)))), HEAD, rope)
    step = Step(np.arange(len(x)), POSITIONS, load, n_ctx=n_ctx)
    return evaluate(g.ops[-1], [x.astype(np.float32)], step).astype(np.float64)


def rotated_pairs(x: Array, angles: Array, pairs: list[tuple[int, int]], size: float = 1.0
                  ) -> Array:  # fmt: skip
    """RoFormer (arXiv:2104.09864), equation 13: pair i of a head turns by its angle; the rest of
    the head stays. angles [n, pairs]."""
    y = x.copy()
    for i, (a, b) in enumerate(pairs):
        cos, sin = size * np.cos(angles[:, i]), size * np.sin(angles[:, i])
        y[:, a] = x[:, a] * cos - x[:, b] * sin
        y[:, b] = x[:, a] * sin + x[:, b] * cos
    return y


HALVES = [(i, i + DIM // 2) for i in range(DIM // 2)]
NEIGHBOURS = [(2 * i, 2 * i + 1) for i in range(DIM // 2)]
THETA = np.array([BASE ** (-2 * i / DIM) for i in range(DIM // 2)])


@pytest.fixture
def x() -> Array:
    return np.random.default_rng(0).standard_normal((len(POSITIONS), HEAD))


@pytest.mark.parametrize(("layout", "pairs"), [("neox", HALVES), ("norm", NEIGHBOURS)])
def test_both_layouts_and_the_part_that_stays(layout, pairs, x: Array) -> None:  # type: ignore[no-untyped-def]
    expected = rotated_pairs(x, POSITIONS[:, None] * THETA, pairs)
    found = turned(Rope(DIM, BASE, layout), x)
    assert np.allclose(found, expected, atol=2e-6)
    assert np.array_equal(found[:, DIM:], x[:, DIM:].astype(np.float32))


def test_linear_interpolation_divides_positions(x: Array) -> None:
    """arXiv:2306.15595: position m becomes m * L / L'."""
    expected = rotated_pairs(x, (POSITIONS / 8)[:, None] * THETA, HALVES)
    assert np.allclose(turned(Rope(DIM, BASE, "neox", 1 / 8), x), expected, atol=2e-6)


def test_yarn(x: Array) -> None:
    """arXiv:2309.00071, section 3.2 and 3.4: r(d) = L / wavelength; below alpha interpolate, above
    beta leave, a ramp between; queries and keys grow by 0.1 ln(s) + 1. As in the authors' code the
    ramp goes over whole pairs between those that turn beta and alpha times."""
    s, n_ctx, alpha, beta = 16.0, 64, 1.0, 32.0

    def pair(turns: float) -> float:  # the pair that turns so often in n_ctx
        return DIM * math.log(n_ctx / (turns * 2 * math.pi)) / (2 * math.log(BASE))

    low, high = max(math.floor(pair(beta)), 0), min(math.ceil(pair(alpha)), DIM - 1)
    gamma = 1 - np.clip((np.arange(DIM // 2) - low) / (high - low), 0, 1)
    theta = (1 - gamma) * THETA / s + gamma * THETA
    size = 0.1 * math.log(s) + 1
    expected = rotated_pairs(x, POSITIONS[:, None] * theta, HALVES, size)
    rope = Rope(DIM, BASE, "neox", 1 / s, yarn=Yarn(n_ctx, 1.0, beta, alpha), magnitude=size)
    assert np.allclose(turned(rope, x), expected, atol=4e-6)


def llama3_factors() -> Array:
    """Llama 3.1's rule (arXiv:2407.21783 and its reference code): wavelengths beyond the old
    context are stretched by 8, short ones stay, and between the two a smooth step."""
    n_ctx, factor, low, high = 8192.0, 8.0, 1.0, 4.0
    wavelength = 2 * math.pi / THETA
    smooth = (n_ctx / wavelength - low) / (high - low)
    theta = np.where(
        wavelength > n_ctx / low, THETA / factor,
        np.where(wavelength < n_ctx / high, THETA, (1 - smooth) * THETA / factor + smooth * THETA),
    )  # fmt: skip
    return THETA / theta


def test_llama_3_factors(x: Array) -> None:
    factors = llama3_factors()
    assert factors.min() == 1 and factors.max() == 8
    weight = Weight("rope_freqs.weight", by_name("f32"), (DIM // 2,))
    expected = rotated_pairs(x, POSITIONS[:, None] * (THETA / factors), NEIGHBOURS)
    rope = Rope(DIM, BASE, "norm", factors=weight)
    found = turned(rope, x, lambda w: factors.astype(np.float32))
    assert np.allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize(("n_ctx", "is_long"), [(128, False), (512, True)])
def test_longrope(n_ctx: int, is_long: bool, x: Array) -> None:
    """arXiv:2402.13753: a factor for each pair, found by search, for texts within the old context
    and for longer ones; the magnitude is sqrt(1 + ln(s) / ln(L))."""
    rng = np.random.default_rng(1)
    factors = {"short": 1 + rng.random(DIM // 2), "long": 1 + 30 * rng.random(DIM // 2)}
    names = {key: Weight(key, by_name("f32"), (DIM // 2,)) for key in factors}
    size = math.sqrt(1 + math.log(4) / math.log(128))
    rope = Rope(DIM, BASE, "neox", factors=names["short"], long_factors=names["long"],
                n_ctx_short=128, magnitude=size)  # fmt: skip
    inside = POSITIONS[POSITIONS < n_ctx]
    table = RopeTable(rope, lambda w: factors[w.name].astype(np.float32), n_ctx)
    table.fill(n_ctx)
    angles = inside[:, None] * (THETA / factors["long" if is_long else "short"])
    rows = table.rows[inside].astype(np.float64)
    half = DIM // 2
    assert np.allclose(rows[:, :half], size * np.cos(angles), atol=2e-5)
    assert np.allclose(rows[:, DIM + half :], size * np.sin(angles), atol=2e-5)


def test_layers_with_bases_of_their_own_and_layers_without_rotation(tmp_path: Path) -> None:
    with GGUF(architectures.write(tmp_path / "gemma3.gguf", "gemma3")) as file:
        _, graph = build_graph(file)
    bases = [op.attrs["rope"].base for op in graph.ops if op.kind == "rope"]
    assert bases == [10000.0] * 4
    path = architectures.write(tmp_path / "own.gguf", "gemma3", rope__freq_base=1e6)
    with GGUF(path) as file:
        _, graph = build_graph(file)
    bases = [op.attrs["rope"].base for op in graph.ops if op.kind == "rope"]
    assert bases == [10000.0, 10000.0, 1e6, 1e6]  # the window's layers first
    with GGUF(architectures.write(tmp_path / "smollm3.gguf", "smollm3")) as file:
        _, graph = build_graph(file)
    assert {op.layer for op in graph.ops if op.kind == "rope"} == {0, 1, 2}  # of four
    with GGUF(architectures.write(tmp_path / "cohere2.gguf", "cohere2")) as file:
        _, graph = build_graph(file)
    assert {op.layer for op in graph.ops if op.kind == "rope"} == {0}  # the window's


def test_scores_depend_on_distance_only() -> None:
    """What rotation is for: q at 40 meets k at 37 as q at 400 meets k at 397."""
    rng = np.random.default_rng(2)
    q, k = rng.standard_normal((2, 1, HEAD))
    scores = []
    for base in (40, 400):
        table = RopeTable(Rope(DIM, BASE, "neox"), no_factors, 512)
        table.fill(512)
        rows = table.rows[[base, base - 3]].astype(np.float64)
        parts = []
        for vector, row in zip((q[0], k[0]), rows, strict=True):
            partner = np.roll(vector[:DIM], DIM // 2)
            parts.append(vector[:DIM] * row[:DIM] + partner * row[DIM:])
        scores.append(parts[0] @ parts[1])
    assert math.isclose(scores[0], scores[1], rel_tol=1e-5)
