"""Slot: the rows of one cache during a lease. Laid out as mlx-lm's own class lays them out, growth included."""

from typing import Any

import mlx.core as mx

from ..handover import wait_for_handover
from ..kernels.into import private, ring_of, steps

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
    """keys, values: all rows, [kv_heads * rows * head_dim]. ring: int32 [6], see `ring_of`.

    by_token: whether keys, and whether values, lie token by token, a token's heads as neighbours; else head by head.
    k, v: what attention reads, [1, kv_heads, 1, head_dim, seen] and [1, kv_heads, 1, seen, head_dim]; or where whole
    buffers are shown, [1, kv_heads, rows, head_dim] and (the same, how many rows count: no less than there are is all).
    moves: whether these change from token to token. limit: the size of a ring; 0 for a cache that grows for ever.
    """

    __slots__ = (
        "buffers",
        "by_token",
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

    def __init__(self, cache: Any, clock: Clock, by_token: tuple[bool, bool] = (False, False)) -> None:
        """Takes the rows out of a cache that `leasable` has let through. by_token: as they lie there."""
        self.clock = clock
        self.by_token = by_token
        self.k: Any
        self.v: Any
        self.limit: int = getattr(cache, "max_size", 0)
        _, self.kv_heads, rows, self.head_dim = cache.keys.shape
        # A full ring's next row is where its index points; until then a row's place is its position.
        self.shift: int = (cache._idx - cache.offset) % self.limit if rows == self.limit else 0
        held = zip((cache.keys, cache.values), by_token, strict=True)
        keys, values = (private((one.swapaxes(1, 2) if by else one).reshape(-1)) for one, by in held)
        self._hold(keys, values, rows)

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
        self.ring = ring_of(self.shift, rows, self.kv_heads, self.by_token)
        self.moves = True
        self.buffers = self._shaped(rows)
        (k_head, k_row), (v_head, v_row) = (self._apart(by, rows) for by in self.by_token)
        every = self.kv_heads * rows * self.head_dim
        self.strides = (every, k_head, k_head, 1, k_row), (every, v_head, v_head, v_row, 1)
        self.rows = rows

    def _apart(self, by_token: bool, rows: int) -> tuple[int, int]:
        """How far apart, in values, the heads of a token lie, and the tokens of a head."""
        head, row = steps(by_token, self.kv_heads, rows)
        return head * self.head_dim, row * self.head_dim

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
        """By as much as mlx-lm grows it, head by head: what lies token by token is full.

        Waits for the last token, whose rows MLX does not know to be written.
        """
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
        keys, values = map(self._seen, (self.keys, self.values), self.by_token)
        return keys[..., :rows, :], values[..., :rows, :]

    def _seen(self, held: mx.array, by_token: bool) -> mx.array:
        """A view, with the strides that mlx-lm's own rows have."""
        if by_token:
            return held.reshape(1, -1, self.kv_heads, self.head_dim).swapaxes(1, 2)
        return held.reshape(1, self.kv_heads, -1, self.head_dim)

    @property
    def index(self) -> int:
        """mlx-lm's `_idx` of a ring: one behind the last row written."""
        last: int = (self.offset - 1 + self.shift) % self.rows
        return last + 1
