"""Caches under a lease: of their own class but for what would show, or change, rows that kernels write to unseen."""

from operator import attrgetter
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..handover import wait_for_handover
from ..kv.borrowed import Borrowed, asked_for, borrow, give_back

if TYPE_CHECKING:
    from .lease import Lease
    from .slot import Slot

_SLOT = attrgetter("slot")


def hand_over(cache: Any, lease: "Lease", slot: "Slot") -> None:
    """From now on the rows are the slot's."""
    held = vars(cache)
    for name in ("keys", "values", "offset", "_idx"):
        held.pop(name, None)
    held.update(lease=lease, slot=slot)
    borrow(cache, _Leased)


def lease_of(caches: Any) -> "Lease | None":
    """The lease of exactly these caches, in this order."""
    lease: Lease | None = getattr(caches[0], "lease", None) if type(caches) is list and caches else None
    if lease is None:
        return None
    try:
        return lease if list(map(_SLOT, caches)) == lease.slots else None
    except AttributeError:
        return None


def end_lease(cache: Any) -> Any:
    """The cache, with its rows. Waits until they are written; if that fails, the lease goes on."""
    held = vars(cache)
    slot = held["slot"]
    wait_for_handover()
    mx.eval(slot.clock.after)
    keys, values = slot.whole()
    del held["slot"], held["lease"]
    give_back(cache)
    held.update(keys=keys, values=values, offset=slot.offset)
    if slot.limit:
        held["_idx"] = slot.index
    return cache


class _Leased(Borrowed):
    lease: "Lease"
    slot: "Slot"

    give_back = end_lease
    keys, values, _idx = map(asked_for, ("keys", "values", "_idx"))

    @property
    def offset(self) -> int:
        """Asked for often, and nothing that could be written to."""
        return self.slot.offset
