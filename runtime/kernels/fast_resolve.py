"""Whether the fast attention is used on this device, and in which of its forms: each only if its self-check holds."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from ..arrays import dtype_name
from .ahead import Ahead
from .attention import Attention
from .backends import Backend, detect
from .fast import FastAttention
from .fast_check import BOUND, errors
from .fast_launch import by_length, clustered, parted
from .memory import MLX, Finding, checking, key, recall, remember, settled
from .program import Program, Unsupported
from .resolve import DTYPE, first_lines, out_of_memory
from .site import Call, Site

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
    site: FastAttention, backend: Backend, programs: tuple[Program, ...], make: Callable[[list[Any]], Call]
) -> tuple[Call | None, str]:
    """By what is remembered, or by a self-check that is remembered, as the exact sites."""
    name = key(backend, programs[0], (site, *(program.digest for program in programs)))
    about = {"site": repr(site), "device": backend.device, "backend": backend.name, "mlx": MLX}
    known, deaths = settled(recall(name))
    if known is not None and deaths:
        remember(name, known, about)
    if known is not None and known.state == "plain":
        return None, known.reason
    if known is None:
        remember(name, checking(deaths), about)
    finding: Finding | None = known
    call: Call | None = None
    try:
        kernels = [backend.make(program) for program in programs]
        call = make(kernels)
        # The first calls: the kernels are compiled ahead where that can be.
        first = make([Ahead(program, backend).of(one) for program, one in zip(programs, kernels, strict=True)])
        measured = errors(site, first) if known is None else errors(site, first, (300,))
        refused = next((one.refused for one in measured if one.refused), "")
        worst = max(measured, key=lambda one: one.found)
        plain = max(one.plain for one in measured)
        if refused:
            finding = Finding("plain", refused)
        elif known is None:
            reason = f"error at most {worst.found:.1e} (bound {BOUND:.1e}), MLX's own up to {plain:.1e}"
            finding = Finding("kernel", reason)
    except Exception as error:  # whatever a kernel or a device does, the exact form is there
        finding = None if out_of_memory(error) else Finding("plain", first_lines(error))
    finally:
        if known is None or finding not in (None, known):
            remember(name, finding, about)
    if finding is None:
        return None, "the device had no memory left to check it"
    return (call if finding.state == "kernel" else None), finding.reason
