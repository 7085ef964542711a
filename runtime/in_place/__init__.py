"""Decoding into the caches' own rows, without a slice, a growth or a copy a token.

A lease takes the rows of a model's caches into buffers that nobody else knows (`lease.py`). Kernels write a token's
keys and values there, behind MLX's back, and MLX's graph orders them: whoever reads a row depends on the q that the
same kernel gives, and whoever writes one depends on the logits of the token before. The caches look as ever: whatever
asks one for its rows, or changes it, ends its lease first (`leased.py`). Rows lie as they lay there (`row_order.py`).
Once all rings are full, their layers find the same arrays at every token, and are built by mx.compile (`compiled.py`).
"""

from .lease import Lease, leasable, put_off
from .leased import lease_of
from .row_order import lying, mixed
from .sites import InPlace, copies_of, in_place_sites, over_whole_buffers, run, sites_over_slots

__all__ = [
    "InPlace",
    "Lease",
    "copies_of",
    "in_place_sites",
    "leasable",
    "lease_of",
    "lying",
    "mixed",
    "over_whole_buffers",
    "put_off",
    "run",
    "sites_over_slots",
]
