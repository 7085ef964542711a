"""Which caches a generated file takes, and what stands in for one when there is none."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from .kv.device import packing
from .kv.layouts import LAYOUTS, mixed_layouts
from .kv.ours import OURS
from .kv.sharing import owned

# What a message names as expected: the usual cache of each kind in a generated file's CACHES.
PLAIN = {"sliding": "RotatingKVCache", "full": "KVCache"}
QUANTIZED = {"sliding": "QuantizedRingCache", "full": "QuantizedGrowingCache"}


# Layouts that mask nothing for one token, as long as a ring is no larger than its window.
MASKLESS = ("ring", "growing")
_OFFSET = attrgetter("offset")


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
    """Says whether a cache list fits a file's CACHES. Lists seen before are known in one look-up."""

    def __init__(self, expected: tuple[tuple[Any, ...], ...]) -> None:
        self.expected = expected
        self.none = (NoCache(),) * len(expected)
        self._known: dict[tuple[Any, ...], str] = {}
        self._maskless: set[tuple[Any, ...]] = set()
        self._rings = [(index, window) for index, (kind, window, *_) in enumerate(expected) if kind == "sliding"]
        # A file without quantized K/V needs no bits to tell caches apart, and has the shorter look-up.
        self._form: Callable[[Any], Any] = type if all(len(one) == 2 for one in expected) else cache_form

    def maskless(self, caches: list[Any]) -> bool:
        """Whether one token needs no mask, and all caches are at one position: what `decode` is made for.

        Of caches that `refuse` has let through.
        """
        if len(caches) != len(self.expected):
            return False
        kinds = tuple(map(type, caches))
        if kinds not in self._maskless:
            if any(LAYOUTS[kind][1] not in MASKLESS for kind in kinds):
                return False
            self._maskless.add(kinds)
        return len(set(map(_OFFSET, caches))) == 1 and all(caches[i].max_size <= window for i, window in self._rings)

    @property
    def quantized(self) -> bool:
        return self._form is cache_form

    def refuse(self, caches: object) -> str:
        """Why the generated file cannot take these caches; "" if it can. It takes mlx-lm's own once they are ours."""
        if caches is None and not self.quantized:
            return ""
        if type(caches) is not list:
            return f"cache is a {type(caches).__name__}, file expects a list"
        forms = tuple(map(self._form, caches))
        reason = self._known.get(forms)
        if reason is None:
            reason = self._known[forms] = self._refuse(caches)
        return reason

    def _refuse(self, caches: list[Any]) -> str:
        """Says the same of all lists of the same forms."""
        own = owned(caches, len(self.expected))
        if len(own) != len(self.expected):
            return f"cache has {len(caches)} entries, file expects {len(self.expected)}"
        for index, (cache, (kind, _, *stored)) in enumerate(zip(own, self.expected, strict=True)):
            _, bits, group_size = cache_form(cache)
            fits = LAYOUTS.get(type(cache), ("",))[0] == kind and type(cache) not in OURS
            if not fits or (bits is None) != (not stored):
                return f"cache {index} is {type(cache).__name__}, file expects {(QUANTIZED if stored else PLAIN)[kind]}"
            if stored and stored != [bits, group_size]:
                return (
                    f"cache {index} has {bits} bits in groups of {group_size}, "
                    f"file expects {stored[0]} in groups of {stored[1]}"
                )
        return mixed_layouts(own)


def cache_form(cache: Any) -> tuple[type, int | None, int | None]:
    """What tells caches apart: the class, and for quantized ones the bits and the group size."""
    return type(cache), *packing(cache)
