"""Which cache classes lay rows out alike. One mask serves all layers of a kind, so these must agree."""

from typing import Any

from mlx_lm.models import cache as mlx_lm_cache

from ..errors import StraightlineError
from .device import PLAIN_ROWS
from .growing import GrowingKVCache, KVCache
from .quantized import (
    BatchQuantizedGrowingCache,
    BatchQuantizedRingCache,
    QuantizedGrowingCache,
    QuantizedRingCache,
    QuantizedRollbackCache,
)
from .ring import RotatingKVCache
from .rollback import SlidingRollbackCache

# Class to (kind of layer as a generated file spells it, layout).
LAYOUTS: dict[type, tuple[str, str]] = {
    mlx_lm_cache.RotatingKVCache: ("sliding", "ring"),
    RotatingKVCache: ("sliding", "ring"),
    QuantizedRingCache: ("sliding", "ring"),
    mlx_lm_cache.BatchRotatingKVCache: ("sliding", "batch ring"),
    BatchQuantizedRingCache: ("sliding", "batch ring"),
    SlidingRollbackCache: ("sliding", "rollback"),
    QuantizedRollbackCache: ("sliding", "rollback"),
    mlx_lm_cache.KVCache: ("full", "growing"),
    KVCache: ("full", "growing"),
    GrowingKVCache: ("full", "growing"),
    mlx_lm_cache.QuantizedKVCache: ("full", "growing"),
    QuantizedGrowingCache: ("full", "growing"),
    mlx_lm_cache.BatchKVCache: ("full", "batch growing"),
    BatchQuantizedGrowingCache: ("full", "batch growing"),
}
if PLAIN_ROWS:
    del LAYOUTS[mlx_lm_cache.QuantizedKVCache]  # no file takes it; the monolith refuses it


def mixed_layouts(caches: Any) -> str:
    """What is wrong with a list whose caches of one kind differ in layout; empty if nothing is."""
    first: dict[str, tuple[int, Any, str]] = {}
    for index, cache in enumerate(caches or ()):
        kind, layout = LAYOUTS.get(type(cache), ("", ""))
        position, other, expected = first.setdefault(kind, (index, cache, layout))
        if layout != expected:
            return (
                f"cache {index} is {type(cache).__name__}, but cache {position} is {type(other).__name__}, "
                f"and one mask serves all {kind} layers; expected caches of one make_cache"
            )
    return ""


def packed_for_cuda(caches: Any) -> str:
    """What is wrong with a list in which a cache hands out packed rows on CUDA; empty if none does."""
    for index, cache in enumerate(caches or ()):
        if type(cache) is mlx_lm_cache.QuantizedKVCache:
            return (
                f"cache {index} is mlx-lm's QuantizedKVCache, whose attention fails on CUDA; expected caches of "
                "make_cache(model, kv_config)"
            )
    return ""


def refuse_mixed(caches: Any) -> None:
    """Raises StraightlineError where mlx-lm would go on with a mask that fits some layers only, or with wrong rows."""
    reason = mixed_layouts(caches) or (packed_for_cuda(caches) if PLAIN_ROWS else "")
    if reason:
        raise StraightlineError(reason)
