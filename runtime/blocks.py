"""Blocks: a few tokens at once through the functions of `decode`, each token a row of its fused sites.

Several tokens of a sequence (a draft to be verified), or one of each of several (a batch). What they need beyond one
token is a mask, and a position for each row. All else in the file is the same: they launch about as much as one does.
"""

from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx

from .in_place import run
from .kernels import Attention, QKVRope, sites_of
from .kernels.masked import Fused, WrittenOut
from .kernels.site import Call, stands_in

MOST = 32  # tokens: beyond, the device is the limit and not the host
PATIENCE = 2  # blocks of a shape, before it is checked whether these are exact
OFFSET, FORM = attrgetter("offset"), attrgetter("shape", "dtype")


class Blocks:
    """Of one generated file, for plain K/V. calls: what serves each of its sites.

    pays: whether any of them is other than what `forward` does.
    """

    def __init__(self, file: ModuleType, calls: Mapping[str, Call]) -> None:
        sites = sites_of(file)
        self.file = file
        attention = {name: site for name, site in sites.items() if isinstance(site, Attention)}
        written_out = all(stands_in(calls[name], site) for name, site in attention.items())
        attend = WrittenOut if written_out else Fused
        self.pays = any(stands_in(calls[name], site) for name, site in sites.items())
        self._calls = dict(calls) | {"sliding_layer": run, "full_layer": run}
        self._attention = {kind: attend(attention[f"{kind}_attention"]) for kind, *_ in file.CACHES}
        self._owners = len(file.CACHES)
        self._first = {kind: (index, window) for index, (kind, window) in reversed([*enumerate(file.CACHES)])}
        self._source = {kind: index for index, (kind, _) in enumerate(file.CACHES)}  # of what readers read: the last
        self._heads = {name: site for name, site in sites.items() if isinstance(site, QKVRope)}
        self._asked: dict[tuple[int, ...], int] = {}

    def due(self, shape: tuple[int, ...], caches: list[Any]) -> bool:
        """Whether blocks of this shape, [B, L, ...], may go this way: over such caches, and not for the first time."""
        times = self._asked[shape] = self._asked.get(shape, 0) + 1
        return times >= PATIENCE and servable(caches[: self._owners], shape[0])

    def begin(self, shape: tuple[int, int], caches: list[Any]) -> SimpleNamespace:
        """What `decode` calls for a block of ids of this shape, [B, L], over caches that were due."""
        batch, length = shape
        offset, position = caches[0].offset, None
        if type(offset) is int:
            # One for each row; of several tokens a row, that of the first.
            position = mx.array(offset) if length > 1 else mx.array([offset] * batch)
        calls = dict(self._calls)
        for name, site in self._heads.items():
            call, kind = calls[name] if length == 1 else site.over_block, name.partition("_")[0]
            if site.kv_heads:
                calls[name] = partial(_stored, call, position, self._attention[kind].views)
            else:
                read = caches[self._source[kind]].offset if position is None else position
                calls[name] = partial(_turned, call if length == 1 else _alone(call), read)
        for kind, (index, window) in self._first.items():
            mask = caches[index].make_mask(length, return_array=False, window_size=window)
            attention = self._attention[kind]
            calls[f"{kind}_attention"] = partial(attention, attention.mask(mask, batch, length))
        return SimpleNamespace(**calls)


def servable(caches: list[Any], batch: int) -> bool:
    """Whether each is there once, and all are at one position, a number; or each holds one for each row in an array.

    The arrays of batch caches may differ: each layer takes its own, as in `forward`. To look would wait for the device.
    """
    offsets = list(map(OFFSET, caches))
    kinds = set(map(type, offsets))
    if len(set(map(id, caches))) < len(caches):
        return False
    if kinds == {int}:
        return len(set(offsets)) == 1
    return kinds == {mx.array} and set(map(FORM, offsets)) == {((batch,), mx.int32)}


def _stored(
    call: Call, position: mx.array | None, views: Call, cache: Any, qkv: Any, *inputs: mx.array
) -> tuple[mx.array, Any, Any]:
    """q, and all keys and values of the cache. inputs: those of QKVRope, with the one position of `decode`.

    position: int32, a scalar or one for each row; None: the cache's own.
    """
    q_norm, k_norm, _, *freqs = inputs
    q, k, v = call(qkv, q_norm, k_norm, cache.offset if position is None else position, *freqs)
    return q, *views(*cache.update_and_fetch(k, v))


def _turned(call: Call, position: mx.array, q: mx.array, q_norm: mx.array, _: mx.array, *freqs: mx.array) -> Any:
    """q of a layer that shares K/V. position: int32, a scalar or one for each row."""
    return call(q, q_norm, position, *freqs)


def _alone(over_block: Call) -> Call:
    return lambda q, *rest: over_block((q,), *rest)
