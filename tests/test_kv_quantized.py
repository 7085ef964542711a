"""B39: quantized rings keep the tokens of mlx-lm's plain ring, in its order, under its masks; and what they weigh."""

import io
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from comparing import assert_same
from kv_reference import attend, cut, dense, join, random_rows, stored
from mlx_lm.models import cache as mlx_lm_cache

from straightline.runtime import StraightlineError
from straightline.runtime.kv import (
    GrowingKVCache,
    QuantizedGrowingCache,
    QuantizedRingCache,
    QuantizedRollbackCache,
    RotatingKVCache,
    SlidingRollbackCache,
)
from straightline.runtime.kv.device import packing

WINDOW = 8
SCHEDULES = {
    "steps": (1,) * 40,
    "prompt then steps": (5, *(1,) * 30),
    "a full prompt": (8, *(1,) * 20),
    "chunk over the window": (21, *(1,) * 12),
    "chunks and steps": (3, 12, 1, 1, 30, *(1,) * 9, 2, 1, 7, 8, 9, 1, 1),
}


def packed(rows: Any, bits: int, group_size: int) -> tuple[tuple[mx.array, ...], ...]:
    return tuple(tuple(mx.quantize(one, group_size, bits)) for one in rows)


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("lengths", SCHEDULES.values(), ids=SCHEDULES)
def test_ring_keeps_the_tokens_order_and_mask_of_mlx_lm(bits: int, lengths: tuple[int, ...]) -> None:
    """Bit for bit: what comes back is mlx-lm's ring, each row quantized by itself; and attention over it is right."""
    rng = np.random.default_rng(0)
    ring, plain = QuantizedRingCache(bits, 32, WINDOW), mlx_lm_cache.RotatingKVCache(WINDOW)
    history = []
    for length in lengths:
        rows = random_rows(rng, length)
        history.append(stored(rows, ring))
        for asked in ({"window_size": WINDOW}, {"window_size": WINDOW, "return_array": True}, {}):
            assert_same(ring.make_mask(length, **asked), plain.make_mask(length, **asked), "mask")
        queries = random_rows(rng, length)[0]
        clone = QuantizedRingCache.from_state(ring.state)
        found = attend(clone, queries, rows, WINDOW)
        assert np.abs(np.array(found) - dense(queries, join(history), WINDOW)).max() < 2e-5
        assert_same(ring.update_packed(*rows), packed(plain.update_and_fetch(*rows), bits, 32), "rows")
        keys, values = zip(*(part.keys_and_values() for part in ring.parts), strict=True)
        assert_same((keys, values), packed(plain.keys_and_values(), bits, 32), "keys and values")
        assert (ring.offset, ring.size(), ring.is_trimmable()) == (plain.offset, plain.size(), plain.is_trimmable())


@pytest.mark.parametrize("filled", [(), (1,), (5,), (7, 1), (8,), (5, *(1,) * 7), (21,), (21, 1, 1)], ids=str)
@pytest.mark.parametrize("layout", ["ring", "growing", "rollback"])
def test_to_quantized_keeps_every_slot(layout: str, filled: tuple[int, ...]) -> None:
    """What `--kv-bits` does in mid-sequence: the same as if the cache had been quantized from the start."""
    rng = np.random.default_rng(0)
    plain: Any
    plain, fresh = {
        "ring": (RotatingKVCache(WINDOW), QuantizedRingCache(4, 32, WINDOW)),
        "growing": (GrowingKVCache(), QuantizedGrowingCache(4, 32)),
        "rollback": (SlidingRollbackCache(WINDOW, 4), QuantizedRollbackCache(4, 32, WINDOW, 4)),
    }[layout]
    window = None if layout == "growing" else WINDOW
    for length in filled:
        rows = random_rows(rng, length)
        plain.update_and_fetch(*rows)
        fresh.update_and_fetch(*rows)
    converted = plain.to_quantized(group_size=32, bits=4)
    assert type(converted) is type(fresh)
    for length in (1, 1, 3, 20, 1):
        rows, queries = random_rows(rng, length), random_rows(rng, length)[0]
        assert_same(attend(converted, queries, rows, window), attend(fresh, queries, rows, window), "attention")
        assert (converted.offset, packing(converted)) == (fresh.offset, (4, 32))


def test_ring_takes_back_what_it_can_and_refuses_the_rest() -> None:
    rng = np.random.default_rng(0)
    for ring in (RotatingKVCache(WINDOW), QuantizedRingCache(4, 32, WINDOW)):
        rows = random_rows(rng, 12)
        clean = type(ring).from_state(ring.state)
        ring.update_and_fetch(*cut(rows, 0, 7))
        clean.update_and_fetch(*cut(rows, 0, 4))
        assert ring.is_trimmable() and ring.trim(3) == 3
        for start in range(4, 12):
            queries, one = random_rows(rng, 1)[0], cut(rows, start, start + 1)
            assert_same(attend(ring, queries, one, WINDOW), attend(clean, queries, one, WINDOW), "attention")
        assert not ring.is_trimmable()
        assert ring.trim(0) == 0
        with pytest.raises(StraightlineError) as refused:
            ring.trim(1)
        assert str(refused.value) == (
            "RotatingKVCache: trim(1) after 12 tokens, but a ring of 8 that is full has lost what it would go back "
            "to; use make_cache(model, rollback=True)"
        )


def test_drop_in_ring_is_mlx_lms() -> None:
    """Same name, same state, same bytes: plain mlx-lm loads what it saves."""
    rng = np.random.default_rng(0)
    mine, plain = RotatingKVCache(WINDOW), mlx_lm_cache.RotatingKVCache(WINDOW)
    assert type(mine).__name__ == "RotatingKVCache" and isinstance(mine, mlx_lm_cache.RotatingKVCache)
    for length in (3, 1, 1, 12, 1, 9):
        rows = random_rows(rng, length)
        assert_same(mine.update_and_fetch(*rows), plain.update_and_fetch(*rows), "rows")
        assert_same(mine.state, plain.state, "state")


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_bytes(bits: int, group_size: int) -> None:
    """Bytes of a row: dim * bits / 8 packed, and a scale and a bias for each group, for keys and for values."""
    heads, dim, depth, window = 2, 128, 16, 512
    keys = mx.zeros((1, heads, 1024, dim), mx.bfloat16)
    row = 2 * heads * (dim * bits // 8 + dim // group_size * 2 * 2)
    for cache, slots in (
        (QuantizedGrowingCache(bits, group_size), 1024),
        (QuantizedRingCache(bits, group_size, window), 1024),
        (QuantizedRollbackCache(bits, group_size, window, depth), window - 1 + 2 * depth),
    ):
        cache.update_and_fetch(keys, keys)
        assert cache.nbytes == row * slots, type(cache).__name__
    ring = QuantizedRingCache(bits, group_size, window)
    for _ in range(3):
        ring.update_and_fetch(keys[:, :, :600], keys[:, :, :600])
        ring.update_and_fetch(keys[:, :, :1], keys[:, :, :1])
    assert ring.nbytes == row * window
    plain = SlidingRollbackCache(window, depth)
    plain.update_and_fetch(keys, keys)
    assert plain.nbytes == 2 * heads * dim * 2 * (window - 1 + 2 * depth)


def test_bits_and_groups_are_checked() -> None:
    with pytest.raises(StraightlineError, match=r"QuantizedGrowingCache: bits is 5; expected 2, 3, 4, 6 or 8"):
        QuantizedGrowingCache(5, 64)
    with pytest.raises(StraightlineError, match=r"QuantizedRingCache: group_size is 16; expected 32, 64 or 128"):
        RotatingKVCache(8).to_quantized(group_size=16, bits=4)


def test_host_work_of_a_step() -> None:
    """No more graph nodes for a step than mlx-lm's own caches of the same storage make."""
    keys = mx.zeros((1, 2, 600, 64), mx.bfloat16)

    def nodes(cache: Any) -> int:
        mx.eval(cache.update_and_fetch(keys, keys))
        mx.eval(cache.update_and_fetch(keys[:, :, :1], keys[:, :, :1]))
        one = keys[:, :, :1]
        mx.eval(one)
        return _count(getattr(cache, "update_packed", cache.update_and_fetch)(one, one))

    ring, growing = nodes(mlx_lm_cache.RotatingKVCache(512)), nodes(mlx_lm_cache.QuantizedKVCache(64, 4))
    assert nodes(RotatingKVCache(512)) == nodes(SlidingRollbackCache(512, 16)) == ring == 2
    assert nodes(QuantizedGrowingCache(4, 64)) == growing
    assert nodes(QuantizedRingCache(4, 64, 512)) == nodes(QuantizedRollbackCache(4, 64, 512, 16)) < growing


def _count(rows: Any) -> int:
    """Primitives that would run to make these rows."""
    flat = [one for part in rows for one in (part if isinstance(part, tuple) else (part,))]
    text = io.StringIO()
    mx.export_to_dot(text, *flat)
    return text.getvalue().count("shape=rectangle")
