"""RotatingKVCache: mlx-lm's ring, which can also be quantized.

Named as mlx-lm's, so that a saved prompt cache holds the name that plain mlx-lm knows.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

from ..errors import StraightlineError
from .growing import fresh, refuse_others


class RotatingKVCache(mlx_lm_cache.RotatingKVCache):  # type: ignore[misc]
    """The last `max_size` tokens, laid out by mlx-lm's own code and therefore bit-equal to mlx-lm's ring.

    Serves sliding layers that do not roll back, and each part of a quantized one.

    given: as long as it holds this many rows, they may lie as the model gave them: those of a first call, or of a state
    that somebody has set. Moving them changes how many there are, or how many are given.
    """

    given: int

    def __init__(self, max_size: int, keep: int = 0) -> None:
        super().__init__(max_size, keep)
        self.given = 0

    def _update_concat(self, keys: mx.array, values: mx.array) -> Any:
        given = keys.shape[2] if self.keys is None else 0
        result = super()._update_concat(keys, values)
        self.given = given
        return result

    @property
    def head_by_head(self) -> bool:
        """Whether a head's rows surely are neighbours, in a ring that holds some.

        A first call of exactly `max_size` tokens leaves a token's heads as neighbours for good: nothing moves them. One
        of which some were taken back does until its rows are full again. For one token the products with such rows
        are not the bits of those with others on CUDA (../in_place/row_order.py).
        """
        return bool(self.keys.shape[2] != self.given)

    @property
    def state(self) -> Any:
        return super().state

    @state.setter
    def state(self, state: Any) -> None:
        self.keys, self.values, self.offset, self.keep, self.max_size, self._idx = state
        self.given = 0 if self.keys is None else self.keys.shape[2]

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        """The same tokens in the same slots, packed: what `mlx_lm.generate --kv-bits` asks every cache for."""
        from .quantized import QuantizedRingCache

        return QuantizedRingCache.of(self, bits=bits, group_size=group_size)

    def trim(self, n: int) -> int:
        """Raises StraightlineError once rows are lost; mlx-lm's own moves the offset over them."""
        if n > 0 and not self.is_trimmable():
            raise StraightlineError(
                f"RotatingKVCache: trim({n}) after {self.offset} tokens, but a ring of {self.max_size} that is full "
                "has lost what it would go back to; use make_cache(model, rollback=True)"
            )
        trimmed: int = super().trim(n)
        return trimmed

    @classmethod
    def merge(cls, caches: list[Any]) -> Any:
        """Raises StraightlineError if some are quantized or roll back; mlx-lm's own fails on their attributes."""
        refuse_others(caches, mlx_lm_cache.RotatingKVCache, cls)
        return super().merge(caches)

    def __copy__(self) -> "RotatingKVCache":
        copy: RotatingKVCache = type(self).from_state(map(fresh, self.state))
        copy.given = self.given
        return copy
