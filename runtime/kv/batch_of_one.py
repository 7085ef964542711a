"""A batch of one: while its single tokens are decoded, its rows are held as those of the one sequence that they are.

mlx-lm's BatchGenerator, and with it the server, keeps a lone request in batch caches too. These ask for a mask, and
for offsets on the device, at every token. For one sequence without padding the mask masks nothing, and mlx-lm's caches
for one sequence lay rows out alike, so those stand in. Whoever asks a batch cache for anything (another request joins,
this one ends, a block of several tokens comes) finds it as mlx-lm would have left it.
"""

from operator import attrgetter
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

from ..evaluation import evaluate
from .borrowed import Borrowed, asked_for, borrow
from .growing import KVCache
from .ring import RotatingKVCache

_SEQUENCE = attrgetter("sequence")


def sequence_of(caches: Any) -> list[Any] | None:
    """The caches of one sequence that stand in for exactly these batch caches, in this order."""
    sequence: list[Any] | None = getattr(caches[0], "sequences", None) if type(caches) is list and caches else None
    if sequence is None:
        return None
    try:
        return sequence if list(map(_SEQUENCE, caches)) == sequence else None
    except AttributeError:
        return None


def due(caches: list[Any]) -> bool:
    """Whether to look at these caches, which have served a single token: at the 1st, 2nd, 4th, 8th, ... time.

    What is padded now may not be later, and looking waits for the device.
    """
    first = caches[0]
    if type(first) not in _FRONTS:
        return False
    first.lone_tokens = times = getattr(first, "lone_tokens", 0) + 1
    return not times & (times - 1) and all(type(cache) in _FRONTS for cache in caches)


def as_sequence(caches: list[Any]) -> list[Any]:
    """Caches of one sequence with the rows of these batch caches; [] if they are not those of one without padding."""
    if not evaluate([[cache.left_padding, cache.offset] for cache in caches]):
        return []
    made = list(map(_as_one, caches))
    return [] if None in made else made


def _as_one(cache: Any) -> Any:
    padding, offset = _number(cache.left_padding), _number(cache.offset)
    if padding is None or offset is None or cache.keys.shape[0] != 1:
        return None
    one: Any
    if type(cache) is mlx_lm_cache.BatchKVCache:
        if padding or offset != cache._idx:
            return None
        one = KVCache()
    else:
        size, rows = cache.max_size, cache.keys.shape[2]
        # A ring of a batch counts the padding too, or nothing of what a longer prompt had before; once full, no matter.
        full = rows == size <= min(offset, cache._offset)
        if padding > 0 or rows > size or not (full or offset == cache._offset):
            return None
        one = RotatingKVCache(size)
        one._idx = cache._idx
        if cache._offset > size:
            one.given = rows  # a ring of a batch keeps any first call of `size` tokens and more as the model gave them
    one.keys, one.values, one.offset = cache.keys, cache.values, offset
    return one if one.step == cache.step else None


def _number(array: mx.array) -> int | None:
    """What stands in an array of one number as mlx-lm makes them, and as it is made again."""
    found: Any = array.item() if array.shape == (1,) and array.dtype == mx.int32 else None
    return None if found is None else int(found)


def stand_in(caches: list[Any], sequence: list[Any]) -> None:
    """From now on the rows of these batch caches are held by the caches of `as_sequence`."""
    caches[0].lone_tokens = 0
    for cache, one in zip(caches, sequence, strict=True):
        front = _FRONTS[type(cache)]
        where = {"sequence": one, "sequences": sequence}
        if front is _Ring:
            ahead = 0 if cache.rotated else cache.max_size - cache._idx
            where["then"] = Then(
                cache.left_padding.item(), cache.rotated, one.offset + ahead, cache._offset - one.offset
            )
        borrow(cache, front, where)


class _Front(Borrowed):
    sequence: Any
    sequences: list[Any]

    where = ("sequence", "sequences", "then")


class _Growing(_Front):
    elsewhere = ("keys", "values", "offset", "_idx")
    keys, values, offset, _idx = map(asked_for, elsewhere)

    def restored(self) -> dict[str, Any]:
        one = self.sequence
        return {"keys": one.keys, "values": one.values, "offset": mx.array([one.offset]), "_idx": one.offset}


class Then(NamedTuple):
    """A ring as its rows were lent. full: the offset from which on each token takes the row of an older one, and mlx-lm
    counts it off the padding. more: what mlx-lm's `_offset` is beyond the tokens of the sequence."""

    padding: int
    rotated: bool
    full: int
    more: int


class _Ring(_Front):
    then: Then

    elsewhere = ("keys", "values", "offset", "left_padding", "_idx", "_offset", "rotated")
    keys, values, offset, left_padding, _idx, _offset, rotated = map(asked_for, elsewhere)

    def restored(self) -> dict[str, Any]:
        one = self.sequence
        padding, rotated, full, more = self.then
        turned = max(0, one.offset - full)
        return {
            "keys": one.keys,
            "values": one.values,
            "offset": mx.array([one.offset]),
            "left_padding": mx.array([padding - turned]),
            "_idx": one._idx,
            "_offset": one.offset + more,
            "rotated": rotated or turned > 0,
        }


_FRONTS: dict[type, type[_Front]] = {mlx_lm_cache.BatchKVCache: _Growing, mlx_lm_cache.BatchRotatingKVCache: _Ring}
