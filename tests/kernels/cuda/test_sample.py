"""argmax and top-k on the device against a stable sort."""

import numpy as np
import pytest
from on_device import floats, get, put, rows

from edgellm.kernels.cuda import sample


def logits(n: int) -> np.ndarray:
    """Rows with ties, NaN, infinities, zeros of both signs, and nothing but NaN."""
    x = np.random.default_rng(1).standard_normal((6, n)).astype(np.float32)
    x[1] = np.round(x[1])
    x[2, ::3] = np.nan
    x[3, n // 2], x[3, -1] = -np.inf, np.inf
    x[4] = np.nan
    x[5] = -np.abs(x[5])
    return x


def best_first(row: np.ndarray) -> np.ndarray:
    return np.argsort(np.where(np.isnan(row), np.inf, -row.astype(np.float64)), kind="stable")


@pytest.mark.parametrize("n", [1, 100, 5000])
def test_argmax(devices, n):
    x = logits(n)
    for device in devices:
        out = put(device, np.full(7, -1), np.int32)
        sample.argmax(device, put(device, x), out, rows(device, 6, 7), n)
        found = get(device, out, 7, kind=np.int32)
        assert found[:6].tolist() == [best_first(row)[0] for row in x] and found[6] == -1


@pytest.mark.parametrize(("n", "k"), [(40, 40), (5000, 1), (9000, 50), (9000, 1000)])
def test_top_k(devices, n, k):
    x = logits(n)
    for device in devices:
        numbers, values = device.alloc(6 * k * 4), floats(device, 6, k)
        scratch = device.alloc(sample.top_k_bytes(6, n, k))
        sample.top_k(device, put(device, x), numbers, values, scratch, rows(device, 6), n, k)
        found, of = get(device, numbers, 6, k, kind=np.int32), get(device, values, 6, k)
        for row, ids, got in zip(x, found, of, strict=True):
            assert np.array_equal(ids, best_first(row)[:k])
            assert np.array_equal(got, row[ids], equal_nan=True)


def test_k_has_a_range(devices):
    device = devices[0]
    with pytest.raises(ValueError, match="1 to 1024 of 5000 numbers, not 1025"):
        sample.top_k(device, *(device.alloc(8) for _ in range(4)), rows(device, 1), 5000, 1025)
