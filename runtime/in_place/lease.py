"""Lease: the caches of one sequence while single tokens are decoded into them, one after another."""

import math
from types import SimpleNamespace
from typing import Any

import mlx.core as mx

from ..kv.growing import GrowingKVCache, KVCache
from ..kv.ring import RotatingKVCache
from .leased import hand_over
from .row_order import ByToken
from .sites import InPlace
from .slot import Clock, Slot

GROWING: tuple[type, ...] = (KVCache, GrowingKVCache)
# Single tokens in a row before a lease is worth its copy of all rows: speculation seldom asks for as many.
PATIENCE = 4


def leasable(caches: list[Any]) -> bool:
    """Whether these caches, which `decode` has just served, may be leased; counts how often that was asked in a row."""
    first = caches[0]
    offset, times = getattr(first, "decoded", (0, 0))
    times = times + 1 if offset == first.offset - 1 else 1
    first.decoded = (first.offset, times)
    return times >= PATIENCE and all(map(_plain, caches))


def put_off(caches: list[Any]) -> None:
    """They are not leasable again before a call of another kind comes: nobody looks at their rows at every token."""
    caches[0].decoded = (caches[0].offset, -math.inf)


def _plain(cache: Any) -> bool:
    """One sequence, laid out as mlx-lm lays it out, in the state that a single token leaves it in."""
    kind, keys = type(cache), cache.keys
    if (kind not in GROWING and kind is not RotatingKVCache) or keys.shape[0] != 1:
        return False
    if keys.shape != cache.values.shape or keys.dtype != cache.values.dtype:
        return False
    if kind in GROWING:
        return bool(cache.offset <= keys.shape[2])
    if cache.keep or keys.shape[2] > cache.max_size:
        return False
    # Before a ring is full, rows that are not surely head by head are about to be moved.
    return bool(keys.shape[2] == cache.max_size or (cache.head_by_head and cache._idx == cache.offset <= keys.shape[2]))


class Lease:
    """slots: what `decode` takes in the place of the caches. Refers to no cache, so that these are freed as ever.

    owner: the guard of the route whose lease it is, which holds no weights; another one's calls end it.
    """

    def __init__(
        self, caches: list[Any], owner: object, whole: bool = False, by_token: list[ByToken] | None = None
    ) -> None:
        """The caches must be `leasable`. What they gave away before is theirs no longer: rows are copied once.

        whole: slots show whole buffers, whose shapes stay, and how many rows count; for an attention that takes these.
        by_token: how the rows of each lie, as `lying` finds; by default head by head.
        """
        self.owner = owner
        by_token = by_token or [(False, False)] * len(caches)
        self.by_token = any(map(any, by_token))
        self.clock = Clock(mx.zeros((1,), caches[0].keys.dtype), caches[0].offset, whole)
        mx.eval(self.clock.after)
        self.slots: list[Slot] = []
        self.moving: list[Slot] = []
        for cache, how in zip(caches, by_token, strict=True):
            slot = Slot(cache, self.clock, how)
            self.moving.append(slot)
            hand_over(cache, self, slot)
        self.slots = self.moving  # only now, so that a lease whose beginning is interrupted is nobody's

    def begin(self, in_place: InPlace) -> tuple[list[Slot], SimpleNamespace]:
        """The slots, ready for a token, and what `decode` calls over them."""
        if self.by_token:
            assert in_place.by_token is not None
            in_place = in_place.by_token
        if self.clock.whole:
            self.clock.rows = mx.array(self.clock.offset + 1, dtype=mx.int32)
            for slot in self.slots:
                slot.show()
            return self.slots, in_place.settled
        for slot in self.moving:
            slot.show()
        return self.slots, in_place.moving if any(slot.limit for slot in self.moving) else in_place.settled

    def end(self, logits: mx.array) -> None:
        """The token of these logits has its place. They are what the next one waits for."""
        self.clock.after = logits
        self.clock.offset += 1
        self.moving = [slot for slot in self.moving if slot.moves]
