"""The best logits of a row on the device against a stable sort."""

import numpy as np
import pytest
from on_device import get, put, rows

from edgellm.kernels.cuda import sample


def logits(n: int) -> np.ndarray:
    """Rows with ties, one NaN or nothing else, infinities, zeros of both signs, subnormals."""
    x = np.random.default_rng(1).standard_normal((7, n)).astype(np.float32)
    x[1] = np.round(x[1])
    x[2, n // 3] = np.nan
    x[3, n // 2], x[3, -1] = -np.inf, np.inf
    x[4] = -np.nan
    x[5] = np.where(np.arange(n) % 3, np.float32(-0.0), np.float32(0.0))
    x[6] *= np.float32(1e-39)
    return x


def best_first(row: np.ndarray) -> np.ndarray:
    """Places: NaN first, then falling; of equals the lowest."""
    return np.argsort(np.where(np.isnan(row), -np.inf, -row.astype(np.float64)), kind="stable")


@pytest.mark.parametrize(
    ("n", "width"), [(1, 1), (40, 64), (5000, 1), (5000, 64), (70_001, 1), (70_001, 64), (300, 8)]
)
def test_best_are_the_head_of_a_stable_sort(devices, n, width):
    """In strips of one turn and (70,001) of two; the last one is shorter."""
    x, k = logits(n), min(n, width)
    for device in devices:
        out = put(device, np.full((8, width), 7), np.uint64)
        strips = device.alloc(sample.strip_bytes(8))
        sample.best(device, put(device, x), strips, out, rows(device, 7, 8), n, width)
        keys = get(device, out, 8, width, kind=np.uint64)
        places, values = sample.decoded(keys)
        assert (keys[:7, k:] == 0).all() and (keys[7] == 7).all()
        for row, found, of in zip(x, places[:7, :k], values[:7, :k], strict=True):
            assert np.array_equal(found, best_first(row)[:k])
            assert np.array_equal(of, row[found], equal_nan=True)


def test_bytes_and_widths():
    assert sample.key_bytes(3) == 3 * 64 * 8 and sample.strip_bytes(3) == 31 * 3 * 64 * 8
    assert [sample.width_of(k) for k in (1, 2, 40, 64)] == [1, 64, 64, 64]
