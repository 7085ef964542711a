"""How a ring's rows lie in memory, which decides whether they may be decoded into in place (docs/decode.md)."""

import copy
from functools import partial
from itertools import count

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_lm_cache
from test_borrowed import interrupted

from straightline.runtime.in_place import Lease, lying, mixed
from straightline.runtime.kv import KVCache, RotatingKVCache
from straightline.runtime.kv.ours import make_ours


def strides(array: mx.array) -> tuple[int, ...]:
    mx.eval(array)
    return memoryview(array).strides


def given(length: int) -> mx.array:
    """As a model gives them: [1, heads, tokens, head_dim] with a token's heads as neighbours."""
    return mx.random.normal((1, length, 2, 4)).transpose(0, 2, 1, 3)


def lies_head_by_head(ring: RotatingKVCache) -> bool:
    """In memory."""
    return all(strides(array)[2:] == (16, 4) for array in (ring.keys, ring.values))


@pytest.mark.parametrize("chunks", [(8,), (7,), (9,), (16,), (23,), (4, 4), (8, 8), (8, 3), (3, 5), (7, 1), (1,) * 9])
def test_a_ring_knows_how_its_rows_lie(chunks: tuple[int, ...]) -> None:
    """Copies go with what they copy."""
    ring = RotatingKVCache(8)
    for length in (*chunks, 1, 1, 1):
        ring.update_and_fetch(*[given(length)] * 2)
    for one in (ring, copy.copy(ring), copy.deepcopy(ring)):
        assert one.head_by_head == lies_head_by_head(ring) == (chunks != (8,))
    ring.update_and_fetch(*[given(1)] * 2)
    ring.update_and_fetch(*[mx.zeros((1, 2, 2, 4))] * 2)
    assert ring.head_by_head and strides(ring.keys)[2:] == (16, 4)


def test_rings_of_unknown_rows() -> None:
    ring = RotatingKVCache(8)
    for length in (5, 1, 1, 1, 1):
        ring.update_and_fetch(*[mx.zeros((1, 2, length, 4))] * 2)
    loaded = RotatingKVCache.from_state(ring.state)
    assert ring.head_by_head and not loaded.head_by_head
    loaded.update_and_fetch(*[mx.zeros((1, 2, 2, 4))] * 2)
    assert loaded.head_by_head
    theirs = [mlx_lm_cache.RotatingKVCache(8) for _ in range(2)]
    for cache in theirs[1:]:
        cache.update_and_fetch(*[mx.zeros((1, 2, 8, 4))] * 2)
    make_ours(theirs)
    for cache in theirs:
        cache.update_and_fetch(*[mx.zeros((1, 2, 1, 4))] * 2)
    assert [cache.head_by_head for cache in theirs] == [True, False]


def test_tokens_taken_back_leave_the_rows_of_a_first_call_where_they_are() -> None:
    """Single tokens go between them, until they are full again."""
    ring = RotatingKVCache(8)
    ring.update_and_fetch(*[given(7)] * 2)
    assert ring.trim(5) == 5
    for _ in range(5):
        ring.update_and_fetch(*[given(1)] * 2)
        assert not ring.head_by_head and not lies_head_by_head(ring)
    ring.update_and_fetch(*[given(1)] * 2)
    assert ring.head_by_head and lies_head_by_head(ring)


def test_a_state_that_is_set_brings_its_rows_along() -> None:
    other = RotatingKVCache(8)
    other.update_and_fetch(*[given(8)] * 2)
    ring = RotatingKVCache(8)
    ring.update_and_fetch(*[given(3)] * 2)
    ring.state = copy.copy(other).state
    for _ in range(4):
        ring.update_and_fetch(*[given(1)] * 2)
    assert not ring.head_by_head and not lies_head_by_head(ring)


def test_mlx_lms_ring_from_which_tokens_were_taken_when_it_was_just_full() -> None:
    """mlx-lm's own lets that pass, and nothing is lost."""
    ring = mlx_lm_cache.RotatingKVCache(8)
    ring.update_and_fetch(*[given(8)] * 2)
    ring.trim(5)
    make_ours([ring])
    for _ in range(4):
        ring.update_and_fetch(*[given(1)] * 2)
    assert not ring.head_by_head and not lies_head_by_head(ring)


def test_an_interrupt_while_mlx_lms_rings_become_ours() -> None:
    """Whichever are ours by then know how their rows lie."""
    for step in count():
        rings = [mlx_lm_cache.RotatingKVCache(8) for _ in range(2)]
        for ring in rings:
            ring.update_and_fetch(*[given(8)] * 2)
        if not interrupted(partial(make_ours, rings), step):
            break
        assert not any(one.head_by_head for one in rings if isinstance(one, RotatingKVCache))
    assert step > 50


def full_ring(keys: mx.array, values: mx.array) -> RotatingKVCache:
    """From a state that somebody has set, before any token has moved its rows."""
    ring = RotatingKVCache.from_state((keys, values, 8, 0, 8, 8))
    mx.eval(ring.keys, ring.values)
    return ring


BY_HEAD = mx.random.normal((1, 2, 8, 4))
ODD = {
    "one head for all": mx.broadcast_to(mx.random.normal((1, 1, 8, 4)), (1, 2, 8, 4)),
    "one token for all": mx.broadcast_to(mx.random.normal((1, 2, 1, 4)), (1, 2, 8, 4)),
    "rows of a longer buffer": mx.random.normal((1, 2, 9, 4))[..., :8, :],
    "every other token": mx.random.normal((1, 2, 16, 4))[..., ::2, :],
    "backwards": BY_HEAD[..., ::-1, :],
    "values apart": mx.random.normal((1, 2, 4, 8)).swapaxes(2, 3),
}


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_how_the_rows_of_rings_lie_is_found(dtype: mx.Dtype) -> None:
    """Of keys and of values, each by itself."""
    by_head, by_token = BY_HEAD.astype(dtype), given(8).astype(dtype)
    pairs = [(by_head, by_head), (by_head, by_token), (by_token, by_head), (by_token, by_token)]
    rings = [full_ring(*pair) for pair in pairs]
    found = [(False, False), (False, True), (True, False), (True, True)]
    assert lying(rings) == found
    alike = [mixed([ring, KVCache()], [how, (False, False)]) for ring, how in zip(rings, found, strict=True)]
    assert alike == [False, True, True, False]
    assert mixed(rings[::3], found[::3]) and not mixed(rings[3:] * 2, found[3:] * 2)


@pytest.mark.parametrize("name", ODD)
def test_rows_that_lie_otherwise(name: str) -> None:
    for pair in ((ODD[name], BY_HEAD), (BY_HEAD, ODD[name]), (given(8), ODD[name])):
        assert lying([full_ring(BY_HEAD, BY_HEAD), full_ring(*pair)]) is None


def test_rows_that_are_surely_head_by_head_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("straightline.runtime.in_place.row_order.bits", None)
    ring, growing = RotatingKVCache(8), KVCache()
    for length in (7, 1, 1):
        for cache in (ring, growing):
            cache.update_and_fetch(*[given(length)] * 2)
    assert lying([ring, growing]) == [(False, False)] * 2


@pytest.mark.parametrize("by_token", [(True, True), (False, True), (True, False)])
def test_a_lease_gives_rows_back_as_they_lay(by_token: tuple[bool, bool]) -> None:
    """With the strides that mlx-lm's own have, so that whatever comes next has its bits."""
    ring = full_ring(*(given(8) if one else mx.random.normal((1, 2, 8, 4)) for one in by_token))
    before = [(strides(rows), rows.tolist()) for rows in (ring.keys, ring.values)]
    lease = Lease([ring], None, by_token=[by_token])
    lease.slots[0].show()
    for view, shown, (lay, rows) in zip(("k", "v"), lease.slots[0].whole(), before, strict=True):
        seen = getattr(lease.slots[0], view)
        assert (seen.swapaxes(3, 4) if view == "k" else seen)[:, :, 0].tolist() == shown.tolist() == rows
        _, head, row, value = lay
        assert strides(seen)[1:] == ((head, head, value, row) if view == "k" else (head, head, row, value))
    assert [(strides(rows), rows.tolist()) for rows in (ring.keys, ring.values)] == before
