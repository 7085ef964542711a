"""How many tokens can be put into a list of caches and taken back again without a trace, and taking them back."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

from ..kv.layouts import LAYOUTS
from ..kv.sharing import SharedCache

UNLIMITED = 1 << 30


def room(caches: list[Any]) -> int:
    """How many single tokens can be appended such that `rewind` can take any of them back; 0 if that is not known."""
    return min(map(_room, caches), default=0)


def rewind(caches: list[Any], count: int) -> None:
    """Take back the last `count` tokens, at most what `room` said before they were appended. Ends a lease."""
    for cache in caches:
        cache.trim(count)
        for plain in getattr(cache, "parts", [cache]):
            if isinstance(plain, (mlx_lm_cache.KVCache, mlx_lm_cache.RotatingKVCache)):
                _blank(plain, count)


def _blank(cache: Any, count: int) -> None:
    """Zeros where there were zeros before. Nobody reads them, but mlx-lm saves them with the cache."""
    start, end = cache.offset, cache.offset + count
    for rows in (cache.keys, cache.values):
        rows[..., start:end, :] = mx.zeros((), rows.dtype)


def _layout(cache: Any) -> str:
    return "none" if type(cache) is SharedCache else LAYOUTS.get(type(cache), ("", ""))[1]


def _room(cache: Any) -> int:
    slot = getattr(cache, "slot", None)
    if slot is not None:  # under a lease, which would end if the cache itself were asked for its rows
        return int(slot.room)
    count = _ROOM.get(_layout(cache))
    plain = cache.parts[0] if hasattr(cache, "parts") else cache
    return 0 if count is None else count(plain)


def _growing(cache: Any) -> int:
    """Rows that are allocated and free: nothing moves while they are filled."""
    return _rows(cache) - int(cache.offset)


def _ring(cache: Any) -> int:
    """The same, as long as no row is written over; a ring that is full takes nothing back."""
    rows = _rows(cache)
    return 0 if rows > cache.max_size else max(min(rows, int(cache.max_size) - 1) - int(cache.offset), 0)


def _rollback(cache: Any) -> int:
    rows = _rows(cache)
    return int(cache.depth if rows == cache.capacity else min(cache.depth, max(rows - cache.offset, 0)))


def _rows(cache: Any) -> int:
    keys = cache.keys[0] if isinstance(cache.keys, (list, tuple)) else cache.keys
    return 0 if keys is None else int(keys.shape[2])


_ROOM: dict[str, Callable[[Any], int]] = {
    "growing": _growing,
    "ring": _ring,
    "rollback": _rollback,
    "none": lambda cache: UNLIMITED,
}
