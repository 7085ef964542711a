"""How each fused site of a model runs here, and how it would in a new process, by what earlier ones remembered."""

from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx

from ..arrays import dtype_name
from ..form import stream_dtype
from .backends import Backend, detect
from .memory import key, recall, settled
from .program import Unsupported
from .resolve import DTYPE, chosen
from .site import Site, sites_of


@dataclass(frozen=True)
class SiteState:
    """name: as the generated file spells it. site: with its sizes.

    state: "kernel", "written out", "plain"; of a process to come also "off" and "not checked yet". reason: why, or "".
    """

    name: str
    site: str
    state: str
    reason: str


def running(model: Any) -> tuple[SiteState, ...]:
    """Each site of a specialized model as it was chosen in this process, then its quantized products by their slot."""
    bound = model._bound
    if not bound.routes:
        return ()
    dtype = stream_dtype(model.get("language_model", model))
    kernels = False if bound.kernels_reason else model._options.kernels
    pairs = (*_named(bound.files), *bound.products)
    found = [(name, site, chosen(site, dtype, kernels)) for name, site in pairs]
    return tuple(SiteState(name, repr(site), one.state, one.reason) for name, site, one in found if one is not None)


def remembered(files: Iterable[ModuleType], dtype: mx.Dtype = DTYPE) -> tuple[SiteState, ...]:
    """Each site of these files as it would run with kernels. Compiles and computes nothing."""
    backend = detect()
    return tuple(SiteState(name, repr(site), *_expected(site, dtype, backend)) for name, site in _named(files))


def _named(files: Iterable[ModuleType]) -> tuple[tuple[str, Site], ...]:
    """Name and site, in the order of the files, each pair once."""
    return tuple(dict.fromkeys(pair for file in files for pair in sites_of(file).items()))


def _expected(site: Site, dtype: mx.Dtype, backend: Backend) -> tuple[str, str]:
    if not backend.name:
        return "plain", backend.reason
    if dtype != DTYPE:
        return "plain", f"{dtype_name(dtype)}: kernels are for bfloat16"
    if site.form(backend.name) is not None:
        return "written out", "if it is exact, which every load checks"
    try:
        found = recall(key(backend, site.program(backend.name), site))
    except Unsupported as error:
        return "plain", str(error)
    if found is None:
        return "not checked yet", ""
    known, _ = settled(found)
    if known is None:
        return "not checked yet", "one process died" if found.died else "another process is checking it"
    return ("kernel" if known.state == "kernel" else "off"), known.reason
