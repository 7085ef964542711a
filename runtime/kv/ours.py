"""mlx-lm's caches for one sequence made ours: the same rows in the same slots, under classes that can be quantized."""

from typing import Any

from mlx_lm.models import cache as mlx_lm_cache

from ..errors import StraightlineError
from .growing import KVCache
from .ring import RotatingKVCache

OURS: dict[type, Any] = {mlx_lm_cache.RotatingKVCache: RotatingKVCache, mlx_lm_cache.KVCache: KVCache}


def quantizable(caches: list[Any]) -> list[Any]:
    """The same caches. mlx-lm's among them are from now on of our class of that name, which `--kv-bits` quantizes."""
    make_ours(caches)
    return caches


def make_ours(caches: Any) -> bool:
    """The same of whatever a model was called with; whether any was mlx-lm's.

    Raises StraightlineError if one of these is there twice.
    """
    theirs = [one for one in caches if type(one) in OURS] if isinstance(caches, (list, tuple)) else []
    if len(set(map(id, theirs))) < len(theirs):
        raise StraightlineError("a cache is in the list twice; expected one for each layer that owns keys and values")
    for one in theirs:
        ours = OURS[type(one)]
        if ours is RotatingKVCache:  # first, so that an interrupt leaves none of ours without
            one.given = 0 if one.keys is None else one.keys.shape[2]
        one.__class__ = ours
    return bool(theirs)
