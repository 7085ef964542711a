"""Which form of a site is used on this device: its kernel if it is exact here, else its plain form, with a reason."""

import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from ..arrays import dtype_name
from .backends import Backend, detect
from .judge import first_lines, judge, out_of_memory
from .launch import launcher
from .memory import Finding, key
from .program import Program, Unsupported
from .selfcheck import SEVERAL_ROWS, compare
from .site import Call, Kernel, Site

DTYPE = mx.bfloat16  # the one dtype that kernels are written for
PATIENCE = 0.5  # seconds before progress is shown: what is remembered takes less


@dataclass(frozen=True)
class Resolved:
    """state: "kernel", "written out" (in MLX's operations) or "plain"; reason: why plain, or what was compared."""

    call: Call
    state: str
    reason: str


_Key = tuple[Site, mx.Dtype, Backend, bool]
_resolved: dict[_Key, Resolved] = {}
_lock = threading.RLock()


def resolve(site: Site, dtype: mx.Dtype = DTYPE) -> Call:
    """What to call for this site: with the arguments of `site.plain`, all floating ones of this dtype.

    The first time in a process a kernel is compiled and compared here, which takes a second or two. Never raises for
    a kernel that cannot be used; see `report`.
    """
    return _resolve((site, dtype, detect(), True)).call


def resolve_all(
    sites: Iterable[Site], dtype: mx.Dtype = DTYPE, progress: bool = True, kernels: bool | None = None
) -> tuple[Call, ...]:
    """`resolve` for many sites; see `resolved`."""
    return tuple(one.call for one in resolved(sites, dtype, progress, kernels))


def resolved(
    sites: Iterable[Site], dtype: mx.Dtype = DTYPE, progress: bool = True, kernels: bool | None = None
) -> tuple[Resolved, ...]:
    """What to call for many sites, and why, with a progress bar where kernels are compiled.

    kernels: whether kernels of our own may be compiled (None: on CUDA, where they are kept); what MLX's operations
        alone can do is used either way.
    """
    backend = detect()
    kernels = _allowed(kernels, backend)
    wanted = [(site, dtype, backend, kernels) for site in sites]
    fresh = [one for one in dict.fromkeys(wanted) if one not in _resolved]
    for one in _shown(fresh, backend) if progress and kernels else fresh:
        _resolve(one)
    return tuple(_resolve(one) for one in wanted)


def chosen(site: Site, dtype: mx.Dtype, kernels: bool | None) -> Resolved | None:
    """What `resolved` has chosen in this process; None if it was not asked for this."""
    backend = detect()
    return _resolved.get((site, dtype, backend, _allowed(kernels, backend)))


def _allowed(kernels: bool | None, backend: Backend) -> bool:
    return backend.name == "cuda" if kernels is None else kernels


def _shown(wanted: list[_Key], backend: Backend) -> Iterable[_Key]:
    if not backend.name or len(wanted) < 2:
        return wanted
    from tqdm import tqdm

    desc = f"checking fused kernels on {backend.device}"
    bar: Iterable[_Key] = tqdm(wanted, desc=desc, unit="kernel", file=sys.stderr, delay=PATIENCE)
    return bar


def report() -> dict[Site, tuple[str, str]]:
    """Each site asked for in this process, in that order: ("kernel", "written out" or "plain", reason).

    Of a site asked for in several ways (another dtype, without kernels) the last; `states.running` is of one model.
    """
    return {site: (found.state, found.reason) for (site, *_), found in list(_resolved.items())}


def forget() -> None:
    """Resolve everything anew; what the cache folder holds is kept."""
    with _lock:
        _resolved.clear()


def _resolve(wanted: _Key) -> Resolved:
    found = _resolved.get(wanted)
    if found is None:
        with _lock:
            found = _resolved.get(wanted) or _choose(*wanted)
            _resolved[wanted] = found
    return found


def _choose(site: Site, dtype: mx.Dtype, backend: Backend, kernels: bool) -> Resolved:
    reason = backend.reason
    if not reason and dtype != DTYPE:
        reason = f"{dtype_name(dtype)}: kernels are for bfloat16"
    if reason:
        return Resolved(site.plain, "plain", reason)
    form = site.form(backend.name)
    if form is not None:
        return _checked_form(site, dtype, form)
    if not kernels:
        return Resolved(site.plain, "plain", "kernels are off; specialize(model, kernels=True) checks them")
    try:
        program = site.program(backend.name)
    except Unsupported as error:
        return Resolved(site.plain, "plain", str(error))
    return _checked(site, dtype, backend, program)


def _checked_form(site: Site, dtype: mx.Dtype, form: Call) -> Resolved:
    """Takes a fraction of a second, so nothing is remembered."""
    try:
        compared = compare(site, form, dtype, site.seeds)
    except Exception as error:
        return Resolved(site.plain, "plain", f"failed: {first_lines(error)}")
    if compared.differs:
        return Resolved(site.plain, "plain", f"not exact here: {compared.differs}")
    return Resolved(form, "written out", f"exact: {compared.values} values compared")


def _checked(site: Site, dtype: mx.Dtype, backend: Backend, program: Program) -> Resolved:
    """By what is remembered, or by a self-check that is remembered."""
    check = partial(_compared, site, dtype, program)
    call, reason = judge(key(backend, program, site), site, backend, (program,), check)
    return Resolved(site.plain, "plain", reason) if call is None else Resolved(call, "kernel", reason)


def _compared(
    site: Site, dtype: mx.Dtype, program: Program, first: list[Kernel], kernels: list[Kernel], known: Finding | None
) -> tuple[Call, Finding]:
    """As `judge` asks for it; where the kernel is known to be exact, one seed is enough."""
    call = launcher(site, program, first[0], dtype, several=True)
    compared = compare(site, call, dtype, site.seeds if known is None else 1)
    if compared.differs:
        return call, Finding("plain", f"not exact here: {compared.differs}")
    if known is not None:
        return launcher(site, program, kernels[0], dtype, known.several), known
    rows = 0 if site.one_row else _compare_rows(site, call, dtype)
    reason = f"exact: {compared.values + rows} values compared{'' if rows or site.one_row else '; one row only'}"
    return launcher(site, program, kernels[0], dtype, rows > 0), Finding("kernel", reason, rows > 0)


def _compare_rows(site: Site, call: Call, dtype: mx.Dtype) -> int:
    """How many values were compared for several rows; 0 if the kernel is not for them."""
    try:
        compared = compare(site, call, dtype, max(4, site.seeds // 4), SEVERAL_ROWS)
    except Exception as error:
        if out_of_memory(error):
            raise
        return 0
    return 0 if compared.differs else compared.values
