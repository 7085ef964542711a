"""Projections of the same input joined into one matrix, once, without holding both copies.

The parts become views of the whole, so adapters, saving and the other forwards see them as before.
"""

import threading
from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .arrays import same_bits
from .evaluation import evaluate
from .watch import edited, plain_class

Arrays = tuple[mx.array, mx.array, mx.array | None]
KEYS = ("weight", "scales", "biases")
_lock = threading.Lock()


class Joined:
    """What the first part remembers of its whole. A copy or pickle of it is None, since its arrays are new."""

    def __init__(self, whole: Arrays, views: list[list[Any]], editions: list[int | None]) -> None:
        self.whole = whole
        self.views = views
        self.editions = editions

    def holds(self, parts: list[Any]) -> bool:
        same = len(parts) == len(self.views) and all(map(_holds, parts, self.views))
        return same and [edited(part) for part in parts] == self.editions

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def join_all(groups: Iterable[list[Any]]) -> None:
    """Joins what can be, before anyone takes the arrays of the parts: those would live on beside the wholes."""
    fresh = [parts for parts in groups if parts and remembered(parts) is None]
    if any([join(parts) is not None for parts in fresh]):
        # The parts that were: up to a copy of these weights, in pieces too small for the next whole.
        mx.clear_cache()


def remembered(parts: list[Any]) -> Arrays | None:
    """The whole of these parts, if they are joined."""
    known = getattr(parts[0], "__dict__", {}).get("_joined")
    return known.whole if known is not None and known.holds(parts) else None


def join(parts: list[Any]) -> Arrays | None:
    """The rows of all parts as one quantized matrix; None if they are not quantized alike, or one is wrapped.

    Exact for one row: each output of MLX's matrix-vector product depends on its own row of the matrix alone. Checked
    here all the same, on these weights.
    """
    if len(parts) == 1 or not all(_alike(parts[0], part) for part in parts):
        _forget(parts[0])
        return None
    with _lock:
        whole = remembered(parts)
        return _join(parts) if whole is None else whole


def _join(parts: list[Any]) -> Arrays | None:
    first, editions, now = parts[0], [edited(part) for part in parts], _arrays(parts)
    if not evaluate([array for arrays in now for array in arrays if array is not None]):
        return None  # inside mx.compile; what was joined is so again after it
    first.__dict__.pop("_joined", None)
    weight, scales, biases = (
        None if arrays[0] is None else mx.concatenate(list(arrays)) for arrays in zip(*now, strict=True)
    )
    evaluate([array for array in (weight, scales, biases) if array is not None])
    assert weight is not None and scales is not None
    whole = (weight, scales, biases)
    if not _exact(whole, parts):
        return None
    views = _views(whole, now)
    # Weights that another thread has loaded meanwhile are newer than these.
    if not Joined(whole, now, editions).holds(parts):
        return None
    # Not through the modules' own methods: nothing changes that a forward would have to notice.
    for part, arrays in zip(parts, views, strict=True):
        for key, array in zip(KEYS, arrays, strict=True):
            if array is not None:
                dict.__setitem__(part, key, array)
    object.__setattr__(first, "_joined", Joined(whole, views, editions))
    return whole


def _forget(first: Any) -> None:
    """A whole that nothing is a view of any more is dropped."""
    known = getattr(first, "__dict__", {}).get("_joined")
    if known is not None and not _holds(first, known.views[0]):
        first.__dict__.pop("_joined", None)


def _holds(part: Any, arrays: list[Any]) -> bool:
    return isinstance(part, dict) and all(part.get(key) is array for key, array in zip(KEYS, arrays, strict=True))


def _arrays(parts: list[Any]) -> list[list[Any]]:
    return [[part.get(key) for key in KEYS] for part in parts]


def _alike(first: Any, part: Any) -> bool:
    if plain_class(part) is not nn.QuantizedLinear or "bias" in part:
        return False
    settings = [(one.group_size, one.bits, one.mode, one["scales"].dtype, "biases" in one) for one in (first, part)]
    return settings[0] == settings[1] and first["weight"].shape[1] == part["weight"].shape[1]


def _exact(whole: Arrays, parts: list[Any]) -> bool:
    first = parts[0]
    size = first["weight"].shape[1] * 32 // first.bits
    dtype = first["scales"].dtype if first.mode == "affine" else mx.bfloat16
    x = mx.random.normal((1, 1, size), key=mx.random.key(0)).astype(dtype)
    settings = {"transpose": True, "group_size": first.group_size, "bits": first.bits, "mode": first.mode}
    one = mx.quantized_matmul(x, whole[0], scales=whole[1], biases=whole[2], **settings)
    apart = mx.concatenate([part(x) for part in parts], axis=-1)
    return same_bits(one, apart)


def _views(whole: Arrays, parts: list[list[Any]]) -> list[list[Any]]:
    """The rows of the whole that are each part's."""
    views: list[list[Any]] = []
    start = 0
    for weight, *_ in parts:
        stop = start + weight.shape[0]
        views.append([None if array is None else array[start:stop] for array in whole])
        start = stop
    evaluate([array for arrays in views for array in arrays if array is not None])
    return views
