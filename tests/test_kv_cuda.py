"""What caches do for CUDA's sake, on any device: packed rows are handed out without gaps, and their bits stay.

That MLX then multiplies by them is for a GPU to show: tests/gpu/quantized_attention.py and tests/gpu/optiq.py.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from comparing import assert_same
from kv_reference import random_rows

from straightline.runtime.kv import QuantizedGrowingCache, QuantizedRingCache, QuantizedRollbackCache, quantized

WINDOW = 300  # more than the 256 rows by which allocations grow
CLASSES: dict[str, Callable[[], Any]] = {
    "growing": lambda: QuantizedGrowingCache(4, 32),
    "ring": lambda: QuantizedRingCache(4, 32, WINDOW),
    "rollback": lambda: QuantizedRollbackCache(4, 32, WINDOW, 4),
    "batch growing": lambda: QuantizedGrowingCache.merge([filled(QuantizedGrowingCache(4, 32), n) for n in (3, 5)]),
    "batch ring": lambda: QuantizedRingCache.merge([filled(QuantizedRingCache(4, 32, WINDOW), n) for n in (3, 5)]),
}
LENGTHS = (5, 1, 1, 249, 1, 40, *(1,) * 12, 310, 1, 1, 3, 1)


def filled(cache: Any, length: int) -> Any:
    cache.update_and_fetch(*random_rows(np.random.default_rng(length), length))
    return cache


def gaps(rows: Any) -> bool:
    return not all(memoryview(one).c_contiguous for part in rows for one in part)


@pytest.mark.parametrize("name", CLASSES)
def test_packed_rows_have_no_gaps_where_mlx_takes_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, usual = CLASSES[name](), CLASSES[name]()
    rng = np.random.default_rng(0)
    had_gaps = False
    for length in LENGTHS:
        rows: Any = random_rows(rng, length)
        if name.startswith("batch"):
            rows = [mx.repeat(one, 2, axis=0) for one in rows]
        monkeypatch.setattr(quantized, "NO_GAPS", False)
        expected = usual.update_and_fetch(*rows)
        monkeypatch.setattr(quantized, "NO_GAPS", True)
        found = cache.update_and_fetch(*rows)
        assert_same(found, expected, f"{length} more")
        assert_same(cache.state, usual.state, "state")
        had_gaps |= gaps(expected)
        assert not gaps(found)
    assert had_gaps  # else nothing was shown


def test_a_ring_that_is_full_is_handed_out_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy, and no node in the graph of a token, once the window is full."""
    monkeypatch.setattr(quantized, "NO_GAPS", True)
    cache = filled(QuantizedRingCache(4, 32, 8), 8)
    for seed in range(3):
        keys, values = cache.update_and_fetch(*random_rows(np.random.default_rng(seed), 1))
        assert all(rows is part.keys for rows, part in zip(keys, cache.parts, strict=True))
        assert all(rows is part.values for rows, part in zip(values, cache.parts, strict=True))
