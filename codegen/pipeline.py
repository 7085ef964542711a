"""The pipeline: target -> plan -> source -> checked source -> laid out. Pure."""

import black

from .errors import SpecError
from .plan import make_plan
from .render import render
from .target import Target
from .verify import verify

MODE = black.Mode(line_length=120)


def source_of(target: Target) -> str:
    """The bytes of one generated file, as text."""
    plan = make_plan(target)
    return layout(verify(render(plan), plan))


def layout(source: str) -> str:
    """black has the last word on layout; its word must be final."""
    laid_out = black.format_str(source, mode=MODE)
    if black.format_str(laid_out, mode=MODE) != laid_out:
        raise SpecError("black: formats its own output differently; expected a fixpoint (is it the pinned version?)")
    return laid_out
