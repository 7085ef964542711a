"""SlidingRollbackCache: a sliding-window cache that takes tokens back, exactly, also after it has wrapped.

Layout: slot = position mod capacity, so that a row's place depends on its position only, not on the calls that led
there, and capacity = window - 1 + 2 * depth, so that taking tokens back finds the older rows still in place.
"""

from typing import Any, NoReturn

import mlx.core as mx
from mlx_lm.models.cache import _BaseCache

from ..errors import OtherLayout, StraightlineError
from .growing import fresh
from .masks import mask_over_chunk, mask_over_slots

DEPTH = 16


class SlidingRollbackCache(_BaseCache):  # type: ignore[misc]
    """Keys and values [B, heads, slots, dim] of the last `capacity` tokens.

    window: how many tokens a query sees, itself included.
    depth: how many tokens behind the furthest one `trim` reaches. Then every result and the state are bit-equal to
        those of a cache that never saw the tokens taken back. (Until 2 * depth, results are, but the state is shorter.
        Until `capacity` tokens were seen, nothing is lost and everything can be taken back.)

    Up to depth + 1 tokens at once are written in place, and all slots come back with a mask. More of them attend to
    the last `window - 1` rows and themselves, in order of time, as in mlx-lm's ring.
    """

    step = 256

    def __init__(self, window: int, depth: int = DEPTH) -> None:
        self.window = window
        self.depth = depth
        self.capacity = window - 1 + 2 * depth
        self.in_place = depth + 1  # the widest append that writes over no row it has to see
        self.keys: Any = None
        self.values: Any = None
        self.offset = 0
        self.oldest = 0  # the first position whose row is still there

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append [B, heads, L, dim]; returns the rows that the mask made before is for."""
        length = keys.shape[2]
        if length > self.in_place:
            return self._append_chunk(keys, values, length)
        self._store(keys, values, self.offset, length)
        rows = min(self.offset, self.capacity)
        if rows == self.keys.shape[2]:
            return self.keys, self.values
        return self.keys[..., :rows, :], self.values[..., :rows, :]

    def _append_chunk(self, keys: mx.array, values: mx.array, length: int) -> tuple[mx.array, mx.array]:
        before = min(self.offset, self.window - 1)
        fetched = (keys, values)
        if before:
            old_keys, old_values = self._rows(before)
            fetched = (mx.concatenate([old_keys, keys], axis=2), mx.concatenate([old_values, values], axis=2))
        kept = min(length, self.capacity)
        self._store(keys[..., length - kept :, :], values[..., length - kept :, :], self.offset + length - kept, kept)
        return fetched

    def _store(self, keys: mx.array, values: mx.array, start: int, length: int) -> None:
        """Write the rows of positions start .. start + length - 1, at most `capacity` of them."""
        end = start + length
        if self.keys is None or (self.keys.shape[2] < self.capacity and end > self.keys.shape[2]):
            self._grow(keys, values, end)
        slot = start % self.capacity
        first = min(length, self.capacity - slot)
        if first == length:
            self.keys[..., slot : slot + length, :] = keys
            self.values[..., slot : slot + length, :] = values
        else:
            self.keys[..., slot:, :] = keys[..., :first, :]
            self.values[..., slot:, :] = values[..., :first, :]
            self.keys[..., : length - first, :] = keys[..., first:, :]
            self.values[..., : length - first, :] = values[..., first:, :]
        self.offset = end
        self.oldest = max(self.oldest, end - self.capacity)

    def _grow(self, keys: mx.array, values: mx.array, slots: int) -> None:
        slots = min(-(-slots // self.step) * self.step, self.capacity)
        more = slots - (0 if self.keys is None else self.keys.shape[2])
        batch, heads = keys.shape[:2]
        new_keys = mx.zeros((batch, heads, more, keys.shape[3]), keys.dtype)
        new_values = mx.zeros((batch, heads, more, values.shape[3]), values.dtype)
        if self.keys is None:
            self.keys, self.values = new_keys, new_values
        else:
            self.keys = mx.concatenate([self.keys, new_keys], axis=2)
            self.values = mx.concatenate([self.values, new_values], axis=2)

    def _rows(self, count: int) -> tuple[mx.array, mx.array]:
        """The last `count` rows in order of time."""
        start = (self.offset - count) % self.capacity
        end = start + count
        if end <= self.capacity:
            return self.keys[..., start:end, :], self.values[..., start:end, :]
        keys, values = (
            mx.concatenate([rows[..., start:, :], rows[..., : end - self.capacity, :]], axis=2)
            for rows in (self.keys, self.values)
        )
        return keys, values

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> mx.array | str | None:
        """The mask for an append of N tokens: None or "causal" where that says it all, else bool [N, rows]."""
        length, window = N, self.window if window_size is None else window_size
        if window > self.window:
            raise StraightlineError(
                f"{type(self).__name__}: make_mask for a window of {window}, but the cache holds {self.window}; "
                "make it with make_cache(model, rollback=True)"
            )
        if self.offset + length <= window and not return_array:
            return None if length == 1 else "causal"
        if length > self.in_place:
            return mask_over_chunk(min(self.offset, self.window - 1), length, window)
        return mask_over_slots(self.offset, length, window, self.capacity)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The rows of the state: the last window - 1 + depth tokens at most, in order of time."""
        return self._rows(min(self.offset - self.oldest, self.window - 1 + self.depth))

    @property
    def state(self) -> tuple[Any, Any, int, int, int]:
        """keys and values in order of time (None if empty), offset, window, depth. Where rows lie follows from it."""
        rows = (None, None) if self.keys is None else self.keys_and_values()
        return *rows, self.offset, self.window, self.depth

    @state.setter
    def state(self, state: Any) -> None:
        keys, values, offset, window, depth = state
        SlidingRollbackCache.__init__(self, window, depth)
        if keys is not None:
            rows = keys.shape[2]
            self._store(keys, values, offset - rows, rows)
            self.oldest = offset - rows

    @property
    def trimmable(self) -> int:
        """How many tokens can be taken back now."""
        return self.offset if not self.oldest else self.offset - self.oldest - self.window + 1

    def is_trimmable(self) -> bool:
        """Whether any token can be taken back now; true of an empty cache, as in mlx-lm."""
        return not self.offset or self.trimmable > 0

    def trim(self, n: int) -> int:
        """Take back the last n tokens (all, if there are fewer): moves the offset, touches no row.

        Raises StraightlineError, with nothing changed, if rows that are gone would be needed.
        """
        n = min(n, self.offset)
        if n > self.trimmable:
            raise StraightlineError(
                f"{type(self).__name__}: trim({n}) after {self.offset} tokens, but only {self.trimmable} can be taken "
                f"back; make the cache with a depth of {n} or more in place of {self.depth}"
            )
        self.offset -= n
        if not self.offset:
            self.keys = self.values = None
        return n

    def size(self) -> int:
        return min(self.offset, self.window)

    def empty(self) -> bool:
        return self.keys is None

    @property
    def nbytes(self) -> int:
        return 0 if self.keys is None else int(self.keys.nbytes + self.values.nbytes)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        """The same tokens in the same slots, packed."""
        from .quantized import QuantizedRollbackCache

        return QuantizedRollbackCache.of(self, bits=bits, group_size=group_size)

    @classmethod
    def merge(cls, caches: list[Any]) -> NoReturn:
        raise OtherLayout(
            f"{cls.__name__} cannot be batched, since each row would roll back by itself; "
            "use make_cache(model) without rollback for batches"
        )

    # What mlx-lm's ring asks of those that it is to be merged with.
    max_size = property(lambda cache: cache.merge([cache]))

    def __copy__(self) -> "SlidingRollbackCache":
        copy = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy.keys, copy.values = fresh(self.keys), fresh(self.values)
        return copy
