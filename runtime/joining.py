"""Projections of the same input joined into one matrix, once, without holding both copies.

The parts become views of the whole, so adapters, saving and the other forwards see them as before.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .evaluation import evaluate
from .watch import plain_class

Arrays = tuple[mx.array, mx.array, mx.array | None]
KEYS = ("weight", "scales", "biases")


class Joined:
    """What the first part remembers of its whole. A copy of the part remembers nothing, since its arrays are new."""

    def __init__(self, whole: Arrays, views: list[list[mx.array]]) -> None:
        self.whole = whole
        self.views = views

    def holds(self, parts: list[Any]) -> bool:
        now = [[part.get(key) for key in KEYS] for part in parts]
        return len(now) == len(self.views) and all(
            one is other
            for mine, theirs in zip(now, self.views, strict=True)
            for one, other in zip(mine, theirs, strict=True)
        )

    def __deepcopy__(self, memo: Any) -> None:
        return None


def join(parts: list[Any]) -> Arrays | None:
    """The rows of all parts as one quantized matrix; None if they are not quantized alike, or one is wrapped.

    Exact for one row: each output of MLX's matrix-vector product depends on its own row of the matrix alone. Checked
    here all the same, on these weights.
    """
    first = parts[0]
    if len(parts) == 1 or not all(_alike(first, part) for part in parts):
        return None
    known = first.__dict__.get("_joined")
    if known is not None and known.holds(parts):
        whole: Arrays = known.whole
        return whole
    arrays = [
        None if key not in first or first[key] is None else mx.concatenate([part[key] for part in parts])
        for key in KEYS
    ]
    if not evaluate([array for array in arrays if array is not None]):
        return None
    whole = (arrays[0], arrays[1], arrays[2])  # type: ignore[assignment]
    if not _exact(whole, parts):
        return None
    _make_views(whole, parts)
    return whole


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
    unsigned = mx.uint32 if one.dtype == mx.float32 else mx.uint16
    return bool(mx.array_equal(one.view(unsigned), apart.view(unsigned)).item())


def _make_views(whole: Arrays, parts: list[Any]) -> None:
    """Not through the modules' own methods: nothing has changed that a forward would have to notice."""
    start = 0
    for part in parts:
        stop = start + part["weight"].shape[0]
        views = {key: array[start:stop] for key, array in zip(KEYS, whole, strict=True) if array is not None}
        evaluate(list(views.values()))
        for key, view in views.items():
            dict.__setitem__(part, key, view)
        start = stop
    joined = Joined(whole, [[part.get(key) for key in KEYS] for part in parts])
    object.__setattr__(parts[0], "_joined", joined)
