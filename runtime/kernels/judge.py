"""Whether a kernel is used: by what is remembered of its check, or by a check that is remembered."""

from collections.abc import Callable, Sequence

from .ahead import Ahead
from .backends import Backend
from .memory import MLX, Finding, checking, recall, remember, settled
from .program import Program
from .site import Call, Kernel, Site

# (kernels for a first call, the same for every other, what is known) -> the call, and what was found. May raise.
Check = Callable[[list[Kernel], list[Kernel], Finding | None], tuple[Call, Finding]]


def judge(
    name: str, site: Site, backend: Backend, programs: Sequence[Program], check: Check
) -> tuple[Call | None, str]:
    """The call that `check` gives for the kernels of `programs`; None, with the reason, where they are not to be used.

    name: under which it is remembered. Never raises for a kernel that cannot be used.
    """
    about = {"site": repr(site), "device": backend.device, "backend": backend.name, "mlx": MLX}
    known, deaths = settled(recall(name))
    if known is not None and known.state == "plain":
        if deaths:
            remember(name, known, about)
        return None, f"{known.reason} (found earlier)"
    if known is None:
        remember(name, checking(deaths), about)
    aheads = [Ahead(program, backend) for program in programs]
    call, finding = None, known
    try:
        call, finding = _checked(aheads, backend, check, known)
    except Exception as error:  # whatever a kernel or a device does, the plain form is there
        finding = None if out_of_memory(error) else Finding("plain", f"failed: {first_lines(error)}")
    finally:
        # Interrupted, or without memory, it says nothing about the kernel.
        if known is None or finding not in (None, known):
            remember(name, finding, about)
    if finding is None:
        return None, "the device had no memory left to check it"
    if finding.state != "kernel":
        return None, finding.reason
    anew = next((one.laid.reason for one in aheads if one.laid is not None and one.laid.reason), "")
    return call, finding.reason + (f"; compiled anew in every process: {anew}" if anew else "")


def _checked(aheads: Sequence[Ahead], backend: Backend, check: Check, known: Finding | None) -> tuple[Call, Finding]:
    """Kernels compiled ahead where that can be; if they fail so, once more as MLX compiles them."""
    try:
        return _once(aheads, backend, check, known)
    except Exception as error:
        if out_of_memory(error) or not any([one.withdraw() for one in aheads]):
            raise
        return _once(aheads, backend, check, known)


def _once(aheads: Sequence[Ahead], backend: Backend, check: Check, known: Finding | None) -> tuple[Call, Finding]:
    kernels = [backend.make(one.program) for one in aheads]
    return check([one.of(kernel) for one, kernel in zip(aheads, kernels, strict=True)], kernels, known)


def out_of_memory(error: Exception) -> bool:
    """Which says nothing about a kernel."""
    said = str(error).lower()
    return ("memory" in said or "unable to allocate" in said) and "illegal" not in said


def first_lines(error: Exception, count: int = 3) -> str:
    """What a compiler says first: the lines with `error`, or the first lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    chosen = [line for line in lines if "error" in line.lower()] or lines
    return " | ".join(chosen[:count])[:600]
