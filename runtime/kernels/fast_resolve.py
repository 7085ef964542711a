"""Whether the fast attention is used on this device, and in which of its forms: each only if its self-check holds."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from ..arrays import dtype_name
from .attention import Attention
from .backends import Backend, detect
from .fast import FastAttention
from .fast_check import BOUND, errors
from .fast_launch import by_length, clustered, parted
from .judge import judge
from .memory import Finding, key
from .program import Program, Unsupported
from .resolve import DTYPE
from .site import Call, Kernel, Site

# Rows up to which one launch is used. Measured on an H200; see docs/fast-tier.md.
ONE_LAUNCH = 2048


@dataclass(frozen=True)
class Fast:
    """call: None where the exact form runs. reason: what was measured, or why it is not used."""

    call: Call | None
    reason: str


_resolved: dict[tuple[FastAttention, mx.Dtype, Backend], Fast] = {}
_lock = threading.RLock()


def faster(
    sites: Mapping[str, Site], dtype: mx.Dtype, whole: bool = False
) -> tuple[dict[str, Call], dict[str, tuple[str, str]]]:
    """The fast tier's calls for those attentions that have one, and ("fast" or "exact", reason) for each."""
    calls, states = {}, {}
    for name, site in sites.items():
        if isinstance(site, Attention):
            found = resolve_fast(FastAttention(site.heads, site.kv_heads, site.head_dim, whole=whole), dtype)
            states[name] = ("exact" if found.call is None else "fast", found.reason)
            if found.call is not None:
                calls[name] = found.call
    return calls, states


def resolve_fast(site: FastAttention, dtype: mx.Dtype = DTYPE) -> Fast:
    """Compiled and checked once a process. Never raises for a kernel that cannot be used."""
    wanted = (site, dtype, detect())
    with _lock:
        if wanted not in _resolved:
            _resolved[wanted] = _choose(*wanted)
        return _resolved[wanted]


def forget() -> None:
    with _lock:
        _resolved.clear()


def _choose(site: FastAttention, dtype: mx.Dtype, backend: Backend) -> Fast:
    if backend.reason:
        return Fast(None, backend.reason)
    if dtype != DTYPE:
        return Fast(None, f"{dtype_name(dtype)}: the fast attention is for bfloat16")
    try:
        one, for_many = site.in_cluster(backend.name, site.cut), site.for_many_rows(backend.name)
    except Unsupported as error:
        return Fast(None, str(error))
    short, why_short = _checked(site, backend, (one,), lambda kernels: clustered(site, one, kernels[0]))
    long, why_long = None, ""
    for two in for_many:
        long, why_long = _checked(site, backend, two, partial(parted, site, two))
        if long is not None:
            break
    if short is not None and long is not None:
        return Fast(by_length(site, short, long, ONE_LAUNCH), why_short)
    if short is None and long is None:
        return Fast(None, why_long)
    return Fast(short or long, why_short if long is None else f"{why_long}; in two launches always: {why_short}")


def _checked(
    site: FastAttention, backend: Backend, programs: tuple[Program, ...], make: Callable[[list[Kernel]], Call]
) -> tuple[Call | None, str]:
    """By what is remembered, or by a self-check that is remembered, as the exact sites."""
    name = key(backend, programs[0], (site, *(program.digest for program in programs)))
    return judge(name, site, backend, programs, partial(_measured, site, make))


def _measured(
    site: FastAttention,
    make: Callable[[list[Kernel]], Call],
    first: list[Kernel],
    kernels: list[Kernel],
    known: Finding | None,
) -> tuple[Call, Finding]:
    """As `judge` asks for it; where the bound is known to hold, one length is enough."""
    call = make(first)
    measured = errors(site, call) if known is None else errors(site, call, (300,))
    refused = next((one.refused for one in measured if one.refused), "")
    if refused:
        return call, Finding("plain", refused)
    if known is None:
        worst, plain = max(one.found for one in measured), max(one.plain for one in measured)
        known = Finding("kernel", f"error at most {worst:.1e} (bound {BOUND:.1e}), MLX's own up to {plain:.1e}")
    return make(kernels), known
