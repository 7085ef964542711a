"""Caches under a lease: of their own class but for what would show, or change, rows that kernels write to unseen."""

from operator import attrgetter
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..handover import wait_for_handover
from ..kv.borrowed import Borrowed, asked_for, borrow

if TYPE_CHECKING:
    from .lease import Lease
    from .slot import Slot

_SLOT = attrgetter("slot")


def hand_over(cache: Any, lease: "Lease", slot: "Slot") -> None:
    """From now on the rows are the slot's."""
    borrow(cache, _Leased, {"slot": slot, "lease": lease})


def lease_of(caches: Any) -> "Lease | None":
    """The lease of exactly these caches, in this order."""
    lease: Lease | None = getattr(caches[0], "lease", None) if type(caches) is list and caches else None
    if lease is None:
        return None
    try:
        return lease if list(map(_SLOT, caches)) == lease.slots else None
    except AttributeError:
        return None


class _Leased(Borrowed):
    lease: "Lease"
    slot: "Slot"

    elsewhere = ("keys", "values", "offset", "_idx")
    where = ("slot", "lease")
    keys, values, _idx = map(asked_for, ("keys", "values", "_idx"))

    @property
    def offset(self) -> Any:
        """Asked for often, and nothing that could be written to, so that the lease goes on."""
        slot = vars(self).get("slot")
        return self.give_back().offset if slot is None else slot.offset

    def restored(self) -> dict[str, Any]:
        """Waits until the rows are written; if that fails, the lease goes on."""
        slot = self.slot
        wait_for_handover()
        mx.eval(slot.clock.after)
        keys, values = slot.whole()
        rows = {"keys": keys, "values": values, "offset": slot.offset}
        return rows | ({"_idx": slot.index} if slot.limit else {})
