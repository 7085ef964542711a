"""Caches under a lease: of their own class but for what would show, or change, rows that kernels write to unseen."""

import copy
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..handover import wait_for_handover

if TYPE_CHECKING:
    from .lease import Lease
    from .slot import Slot

_SLOT = attrgetter("slot")
_classes: dict[type, type] = {}


def hand_over(cache: Any, lease: "Lease", slot: "Slot") -> None:
    """From now on the rows are the slot's."""
    held = vars(cache)
    for name in ("keys", "values", "offset", "_idx"):
        held.pop(name, None)
    held.update(lease=lease, slot=slot)
    cache.__class__ = _leased(type(cache))


def lease_of(caches: Any) -> "Lease | None":
    """The lease of exactly these caches, in this order."""
    lease: Lease | None = getattr(caches[0], "lease", None) if type(caches) is list and caches else None
    if lease is None:
        return None
    try:
        return lease if list(map(_SLOT, caches)) == lease.slots else None
    except AttributeError:
        return None


def end_leases(caches: Any) -> bool:
    """Each cache of a list is its own again; whether any was not."""
    leased = [cache for cache in caches if isinstance(cache, _Leased)] if isinstance(caches, (list, tuple)) else []
    for cache in leased:
        end_lease(cache)
    return bool(leased)


def end_lease(cache: Any) -> Any:
    """The cache, with its rows. Waits until they are written; if that fails, the lease goes on."""
    held = vars(cache)
    slot = held["slot"]
    wait_for_handover()
    mx.eval(slot.clock.after)
    keys, values = slot.whole()
    del held["slot"], held["lease"]
    cache.__class__ = type(cache).__bases__[-1]
    held.update(keys=keys, values=values, offset=slot.offset)
    if slot.limit:
        held["_idx"] = slot.index
    return cache


def _property(name: str) -> property:
    return property(
        lambda cache: getattr(end_lease(cache), name), lambda cache, value: setattr(end_lease(cache), name, value)
    )


class _Leased:
    """Comes before the class of a cache. Every way to its rows ends the lease."""

    lease: "Lease"
    slot: "Slot"

    keys, values, _idx = map(_property, ("keys", "values", "_idx"))

    @property
    def offset(self) -> int:
        """Asked for often, and nothing that could be written to."""
        return self.slot.offset

    @offset.setter
    def offset(self, value: int) -> None:
        end_lease(self).offset = value

    def __copy__(self) -> Any:
        return copy.copy(end_lease(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(end_lease(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return end_lease(self).__reduce_ex__(protocol)


def _leased(kind: type) -> type:
    """Named as the class it stands for, which is what saved prompt caches are read back by."""
    if kind not in _classes:
        _classes[kind] = type(kind.__name__, (_Leased, kind), {"__module__": kind.__module__})
    return _classes[kind]
