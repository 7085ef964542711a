"""Which caches a generated file takes, and what stands in for one when there is none."""

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from .kv.layouts import LAYOUTS, mixed_layouts

# What a message names as expected: the plain cache of each kind in a generated file's CACHES.
PLAIN = {"sliding": "RotatingKVCache", "full": "KVCache"}


class NoCache:
    """mlx-lm's forward without a cache: positions from 0, the keys and values of this call only."""

    offset = 0

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        if N == 1:
            return None
        if return_array or (window_size and window_size < N):
            mask: mx.array = create_causal_mask(N, window_size=window_size)
            return mask
        return "causal"

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values


class CacheGuard:
    """Says whether a cache list fits a file's CACHES. Lists seen before are known by their classes, in one look-up."""

    def __init__(self, expected: tuple[tuple[str, int | None], ...]) -> None:
        self.expected = expected
        self.none = (NoCache(),) * len(expected)
        self._known: set[tuple[type, ...]] = set()

    def refuse(self, caches: object) -> str:
        """Why the generated file cannot take these caches; empty if it can."""
        if type(caches) is not list:
            return f"cache is a {type(caches).__name__}, file expects a list"
        classes = tuple(map(type, caches))
        if classes in self._known:
            return ""
        if len(caches) != len(self.expected):
            return f"cache has {len(caches)} entries, file expects {len(self.expected)}"
        for index, (cache, (kind, _)) in enumerate(zip(caches, self.expected, strict=True)):
            if LAYOUTS.get(type(cache), ("",))[0] != kind or hasattr(cache, "bits"):
                return f"cache {index} is {type(cache).__name__}, file expects {PLAIN[kind]}"
        reason = mixed_layouts(caches)
        if not reason:
            self._known.add(classes)
        return reason
