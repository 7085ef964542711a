"""Slot: the rows of one cache during a lease. Laid out as mlx-lm's own class lays them out, growth included."""

from typing import Any

import mlx.core as mx

from ..handover import wait_for_handover
from ..kernels.into import private

STEP = 256  # rows that mlx-lm's caches grow by


class Clock:
    """The state that all slots of a lease share.

    after: what the next token's writes have to wait for, the logits of the last. offset: how many tokens there are.
    whole: whether slots show whole buffers. rows: then int32, how many of their rows the token sees, on the device.
    """

    __slots__ = ("after", "offset", "rows", "whole")

    def __init__(self, after: mx.array, offset: int, whole: bool = False) -> None:
        self.after = after
        self.offset = offset
        self.whole = whole
        self.rows: mx.array | None = None


class Slot:
    """keys, values: all rows, [kv_heads * rows * head_dim]. ring: int32 [2], see QKVRopeInto.

    k, v: what attention reads, [1, kv_heads, 1, head_dim, seen] and [1, kv_heads, 1, seen, head_dim]; or where whole
    buffers are shown, [1, kv_heads, rows, head_dim] and (the same, how many rows count: no less than there are is all).
    moves: whether these change from token to token. limit: the size of a ring; 0 for a cache that grows for ever.
    """

    __slots__ = (
        "buffers",
        "clock",
        "head_dim",
        "k",
        "keys",
        "kv_heads",
        "limit",
        "moves",
        "ring",
        "rows",
        "shift",
        "strides",
        "v",
        "values",
    )

    def __init__(self, cache: Any, clock: Clock) -> None:
        """Takes the rows out of a cache that `leasable` has let through."""
        self.clock = clock
        self.k: Any
        self.v: Any
        self.limit: int = getattr(cache, "max_size", 0)
        _, self.kv_heads, rows, self.head_dim = cache.keys.shape
        # A full ring's next row is where its index points; until then a row's place is its position.
        self.shift: int = (cache._idx - cache.offset) % self.limit if rows == self.limit else 0
        self._hold(private(cache.keys.reshape(-1)), private(cache.values.reshape(-1)), rows)

    @property
    def offset(self) -> int:
        return self.clock.offset

    @property
    def room(self) -> int:
        """How many tokens can come before rows are moved, or those of a ring written over."""
        rows = min(self.rows, self.limit - 1) if self.limit else self.rows
        return max(rows - self.offset, 0)

    def _hold(self, keys: mx.array, values: mx.array, rows: int) -> None:
        """How many rows there are comes last: until then an interrupt leaves a slot that is about to grow."""
        self.keys, self.values = keys, values
        self.ring = mx.array([self.shift, rows], dtype=mx.int32)
        self.moves = True
        self.buffers = self._shaped(rows)
        head = rows * self.head_dim
        outer = (self.kv_heads * head, head, head)
        self.strides = (*outer, 1, self.head_dim), (*outer, self.head_dim, 1)
        self.rows = rows

    def show(self) -> None:
        """Views of the rows that the token at `offset` sees, itself included; room for it first."""
        offset = self.clock.offset
        if offset == self.rows and self.rows != self.limit:
            self._grow()
        if self.clock.whole:
            self.k, values = self.buffers
            self.v = (values, self.clock.rows)
            return
        rows, kv_heads, head_dim = self.rows, self.kv_heads, self.head_dim
        seen = offset + 1 if offset < rows else rows
        k_strides, v_strides = self.strides
        self.k = mx.as_strided(self.keys, (1, kv_heads, 1, head_dim, seen), k_strides)
        self.v = mx.as_strided(self.values, (1, kv_heads, 1, seen, head_dim), v_strides)
        self.moves = seen < rows or rows != self.limit

    def _grow(self) -> None:
        """By as much as mlx-lm grows it. Waits for the last token, whose rows MLX does not know to be written."""
        wait_for_handover()
        mx.eval(self.clock.after)
        more = min(STEP, self.limit - self.rows) if self.limit else STEP
        room = mx.zeros((1, self.kv_heads, more, self.head_dim), self.keys.dtype)
        keys, values = (mx.concatenate([old, room], axis=2).reshape(-1) for old in self.whole())
        mx.eval(keys, values)
        self._hold(keys, values, self.rows + more)

    def whole(self) -> tuple[mx.array, mx.array]:
        """keys and values as a cache holds them, [1, kv_heads, rows, head_dim]. What was asked for must be done."""
        return self._shaped(self.rows)

    def _shaped(self, rows: int) -> tuple[mx.array, mx.array]:
        keys, values = (held.reshape(1, self.kv_heads, -1, self.head_dim) for held in (self.keys, self.values))
        return keys[..., :rows, :], values[..., :rows, :]

    @property
    def index(self) -> int:
        """mlx-lm's `_idx` of a ring: one behind the last row written."""
        last: int = (self.offset - 1 + self.shift) % self.rows
        return last + 1
