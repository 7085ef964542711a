"""Which caches a generated file takes, and what stands in for one when there is none."""

from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, KVCache, RotatingKVCache

from .errors import StraightlineError

# Kinds as a generated file spells them in CACHES, and the mlx-lm classes that serve each.
SERVED: dict[str, tuple[type, type]] = {
    "sliding": (RotatingKVCache, BatchRotatingKVCache),
    "full": (KVCache, BatchKVCache),
}


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
    """Says whether a cache list fits a file's CACHES. The usual lists are known by their classes in one set look-up."""

    def __init__(self, expected: tuple[tuple[str, int | None], ...]) -> None:
        self.expected = expected
        self.none = (NoCache(),) * len(expected)
        self._known = {tuple(SERVED[kind][batch] for kind, _ in expected) for batch in (0, 1)}

    def refuse(self, caches: object) -> str:
        """Why the generated file cannot take these caches; empty if it can."""
        if type(caches) is list and tuple(map(type, caches)) in self._known:
            return ""
        if type(caches) is not list:
            return f"cache is a {type(caches).__name__}, file expects a list"
        if len(caches) != len(self.expected):
            return f"cache has {len(caches)} entries, file expects {len(self.expected)}"
        for index, (cache, (kind, _)) in enumerate(zip(caches, self.expected, strict=True)):
            if type(cache) not in SERVED[kind]:
                return f"cache {index} is {type(cache).__name__}, file expects {SERVED[kind][0].__name__}"
        self._known.add(tuple(map(type, caches)))
        return ""


def make_cache(model: Any, kv_config: list[dict[str, int]] | None = None, rollback: bool = False) -> list[Any]:
    """The cache list of a model: one mlx-lm cache for each layer that owns keys and values.

    kv_config and rollback: not supported in this version; anything but the defaults raises StraightlineError.
    """
    if kv_config is not None:
        raise StraightlineError("make_cache: kv_config is not supported in this version; expected None")
    if rollback:
        raise StraightlineError("make_cache: rollback is not supported in this version; expected False")
    caches: list[Any] = model.make_cache()
    return caches
