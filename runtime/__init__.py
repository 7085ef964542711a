"""Run, tap and verify Gemma 4 on MLX: mlx-lm models with their forward replaced by a generated straight-line file.

Names are imported when they are first used, so that `straightline --help` does not wait for MLX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .versions import refuse_other_versions

if TYPE_CHECKING:
    from .decoding import stream
    from .errors import StraightlineError
    from .kv import make_cache
    from .loading import load
    from .model import specialize
    from .registry import load_generated
    from .taps import HiddenTap

refuse_other_versions()

__all__ = ["HiddenTap", "StraightlineError", "load", "load_generated", "make_cache", "specialize", "stream"]

_HOMES = {
    "HiddenTap": ".taps",
    "StraightlineError": ".errors",
    "load": ".loading",
    "load_generated": ".registry",
    "make_cache": ".kv",
    "specialize": ".model",
    "stream": ".decoding",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
