"""The table of fused sites that `explain`, `verify` and `bench` print. Pure."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .words import table

if TYPE_CHECKING:
    from ..kernels.states import SiteState


def site_table(states: "Sequence[SiteState]", indent: str = "  ") -> list[str]:
    """One line a site: its name, how it runs and why, its sizes. The same reason for all is said once."""
    reasons = {(one.state, one.reason) for one in states}
    if len(reasons) == 1:
        ((state, reason),) = reasons
        head = f"{indent}{len(states)} sites, all {state}{f' ({reason})' if reason else ''}: "
        return [head + ", ".join(one.name for one in states)]
    return table([(one.name, _said(one.state, one.reason), one.site) for one in states], indent)


def _said(state: str, reason: str) -> str:
    if not reason:
        return state
    return f"{state} ({reason})" if state in ("kernel", "written out") else f"{state}: {reason}"
