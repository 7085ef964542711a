"""How the rows of caches lie in memory: head by head, which mlx-lm's code makes, or as a model gave them, by token.

MLX's products over the one and over the other have other bits on CUDA, so that a slot keeps what it finds.
"""

from typing import Any

import mlx.core as mx

from ..arrays import bits
from ..kv.ring import RotatingKVCache

ByToken = tuple[bool, bool]  # whether keys lie token by token, and whether values do


def lying(caches: list[Any]) -> list[ByToken] | None:
    """Of each `leasable` cache, whose rows are evaluated; None if rows of one lie in any other way.

    Looked at are those of rings that may hold what a model gave them. On CUDA that moves them to where the host can
    read, which a lease's own copies are not.
    """
    found = list(map(_lying, caches))
    known = [one for one in found if one is not None]
    return known if len(known) == len(found) else None


def mixed(caches: list[Any], found: list[ByToken]) -> bool:
    """Whether rings lie some so and some so, or keys otherwise than values; found: by `lying`.

    No model leaves them so on CUDA. Products with some would be over copies, and those with others not.
    """
    rings = zip(caches, found, strict=True)
    return len({way for cache, ways in rings if type(cache) is RotatingKVCache for way in ways}) > 1


def _lying(cache: Any) -> ByToken | None:
    if type(cache) is not RotatingKVCache or cache.head_by_head:
        return False, False
    keys, values = _by_token(cache.keys), _by_token(cache.values)
    return None if keys is None or values is None else (keys, values)


def _by_token(rows: mx.array) -> bool | None:
    """rows: [1, kv_heads, rows, head_dim]. None: neither so nor head by head. With one head both are the same."""
    shape, view = rows.shape, memoryview(bits(rows))  # type: ignore[arg-type]
    _, kv_heads, count, head_dim = shape
    found = [step // view.itemsize for step in view.strides or ()]
    for by_token, (head, row) in ((False, (count, 1)), (True, (1, kv_heads))):
        expected = (0, head * head_dim, row * head_dim, 1)
        if all(size == 1 or one == other for size, one, other in zip(shape, found, expected, strict=True)):
            return by_token
    return None
