"""Whether the installed mlx-lm still has the code that the generated files were made from, as upstream.lock names it.

The supported range holds releases that came later. Where one of them computes otherwise, mlx-lm's own code serves.
"""

from dataclasses import replace
from functools import cache
from importlib.metadata import version

from ..codegen import upstream

MODELS = "models/"


@cache
def changed_upstream() -> str:
    """The first change since the version that is locked; empty if there is none. Raises SpecError for a bad lock."""
    locked = upstream.read_lock(upstream.LOCK)
    if version("mlx-lm") == locked.version:
        return ""
    models = replace(locked, sources=tuple(one for one in locked.sources if one.path.startswith(MODELS)))
    try:
        changes = upstream.differences(models, upstream.installed(models))
    except ImportError:
        # Without libcst (of the codegen extra) nothing tells which of a file's functions differ.
        return f"mlx_lm/models changed in mlx-lm {version('mlx-lm')}; expected {locked.version}, or the codegen extra"
    return changes[0] if changes else ""
