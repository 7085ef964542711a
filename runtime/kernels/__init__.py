"""Fused sites: what a decode step does often, as one kernel each where that is exact on this device.

A site is a frozen dataclass with its sizes baked in. `resolve(site, dtype)` gives the callable to use for it.
"""

from .attention import Attention
from .copies import HeadCopies
from .experts import GatedExperts, QuantizedRouter, Router, SummedExperts
from .fast import FastAttention
from .fast_resolve import faster
from .gates import Geglu, PerLayerGate
from .into import QKVRopeInto
from .joint import PerLayerEnd, ProductHeads
from .matvec import QuantizedMatvec, QuantizedPerLayerGate
from .norms import DualResidualNorms, ResidualNorms
from .resolve import report, resolve, resolve_all, resolved
from .rope import QKVRope
from .scores import AttentionScores
from .site import Call, Site, sites_of

__all__ = [
    "Attention",
    "AttentionScores",
    "Call",
    "DualResidualNorms",
    "FastAttention",
    "GatedExperts",
    "Geglu",
    "HeadCopies",
    "PerLayerEnd",
    "PerLayerGate",
    "ProductHeads",
    "QKVRope",
    "QKVRopeInto",
    "QuantizedMatvec",
    "QuantizedPerLayerGate",
    "QuantizedRouter",
    "ResidualNorms",
    "Router",
    "Site",
    "SummedExperts",
    "faster",
    "report",
    "resolve",
    "resolve_all",
    "resolved",
    "sites_of",
]
