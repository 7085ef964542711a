"""How many tokens can be put into a list of caches and taken back again without a trace, and taking them back."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

from ..kv.growing import GrowingKVCache
from ..kv.quantized import QuantizedGrowingCache, QuantizedRingCache, QuantizedRollbackCache
from ..kv.ring import RotatingKVCache
from ..kv.rollback import SlidingRollbackCache
from ..kv.sharing import SharedCache

UNLIMITED = 1 << 30


def _growing(cache: Any) -> int:
    """Rows that are allocated and free: nothing moves while they are filled."""
    return 0 if cache.keys is None else int(cache.keys.shape[2] - cache.offset)


def _packed(cache: Any) -> int:
    return 0 if cache.keys is None else int(cache.keys[0].shape[2] - cache.offset)


def _ring(cache: Any) -> int:
    """The same, as long as no row is written over; a ring that is full takes nothing back."""
    if cache.keys is None or cache.keys.shape[2] > cache.max_size:
        return 0
    return max(int(min(cache.keys.shape[2], cache.max_size - 1) - cache.offset), 0)


def _rollback(cache: Any) -> int:
    if cache.keys is None:
        return 0
    slots = cache.keys.shape[2]
    return int(cache.depth if slots == cache.capacity else min(cache.depth, max(slots - cache.offset, 0)))


_ROOM: dict[type, Callable[[Any], int]] = {
    mlx_lm_cache.KVCache: _growing,
    GrowingKVCache: _growing,
    mlx_lm_cache.QuantizedKVCache: _packed,
    mlx_lm_cache.RotatingKVCache: _ring,
    RotatingKVCache: _ring,
    SlidingRollbackCache: _rollback,
    QuantizedGrowingCache: lambda cache: _growing(cache.parts[0]),
    QuantizedRingCache: lambda cache: _ring(cache.parts[0]),
    QuantizedRollbackCache: lambda cache: _rollback(cache.parts[0]),
    SharedCache: lambda cache: UNLIMITED,
}


def known(caches: list[Any]) -> bool:
    """Whether all are of classes that are read here."""
    return all(type(cache) in _ROOM for cache in caches)


def room(caches: list[Any]) -> int:
    """How many single tokens can be appended such that `rewind` can take any of them back; 0 if that is not known."""
    return min((_ROOM[type(cache)](cache) if type(cache) in _ROOM else 0 for cache in caches), default=0)


def rewind(caches: list[Any], count: int) -> None:
    """Take back the last `count` tokens, at most what `room` said before they were appended."""
    for cache in caches:
        cache.trim(count)
        if isinstance(cache, (mlx_lm_cache.KVCache, mlx_lm_cache.RotatingKVCache)):
            _blank(cache, count)


def _blank(cache: Any, count: int) -> None:
    """Zeros where there were zeros before. Nobody reads them, but mlx-lm saves them with the cache."""
    start, end = cache.offset, cache.offset + count
    for rows in (cache.keys, cache.values):
        if rows is not None:
            rows[..., start:end, :] = mx.zeros((), rows.dtype)
