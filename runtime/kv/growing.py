"""KVCache: mlx-lm's, quantized into a cache of ours. GrowingKVCache: its state holds the rows of its tokens alone.

mlx-lm's own state is the whole allocation, in which rejected tokens and zeros lie behind the last row. The first is
named as mlx-lm's, so that a saved prompt cache holds the name that plain mlx-lm knows.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

from ..errors import StraightlineError


class KVCache(mlx_lm_cache.KVCache):  # type: ignore[misc]
    """Every token, in order, from slot 0, by mlx-lm's own code. Serves layers with full attention."""

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        """The same tokens in the same slots, packed: what `mlx_lm.generate --kv-bits` asks every cache for."""
        from .quantized import QuantizedGrowingCache

        return QuantizedGrowingCache.of(self, bits=bits, group_size=group_size)

    @classmethod
    def merge(cls, caches: list[Any]) -> Any:
        """Raises StraightlineError if some are quantized; mlx-lm's own fails on them, or makes empty ones plain."""
        refuse_others(caches, mlx_lm_cache.KVCache, cls)
        return super().merge(caches)

    def __copy__(self) -> "KVCache":
        copy: KVCache = type(self).from_state(map(fresh, self.state))
        return copy


class GrowingKVCache(KVCache):
    """Every token, in order, from slot 0. `trim(n)` is exact at any time: it moves the offset, and rows go stale.

    Serves layers with full attention when they roll back, and each part of a quantized one.
    """

    @property
    def state(self) -> tuple[Any, Any, int]:
        """keys and values [B, heads, offset, dim] (None if empty), and the offset."""
        if self.keys is None:
            return None, None, self.offset
        return self.keys[..., : self.offset, :], self.values[..., : self.offset, :], self.offset

    @state.setter
    def state(self, state: Any) -> None:
        self.keys, self.values, self.offset = map(fresh, state)

    def trim(self, n: int) -> int:
        """Take back the last n tokens (all, if there are fewer): moves the offset, touches no row."""
        trimmed: int = super().trim(n)
        if not self.offset:
            self.keys = self.values = None
        return trimmed


def refuse_others(caches: list[Any], kind: type, wanted: type) -> None:
    """Raises StraightlineError if some are not of the kind that a batch of `wanted` holds."""
    other = next((type(one).__name__ for one in caches if not isinstance(one, kind)), "")
    if other:
        raise StraightlineError(
            f"a batch of {wanted.__name__} cannot hold a {other}: make all caches with the same kv_config"
        )


def fresh(value: Any) -> Any:
    """The same rows under another Python object: caches write into theirs in place, so no two may share one."""
    return value[...] if isinstance(value, mx.array) else value
