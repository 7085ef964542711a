"""Run, tap and verify Gemma 4 on MLX: mlx-lm models with their forward replaced by a generated straight-line file."""

from .versions import check_versions

check_versions()

from .errors import StraightlineError  # noqa: E402
from .kv import make_cache  # noqa: E402
from .loading import load  # noqa: E402
from .model import specialize  # noqa: E402
from .registry import load_generated  # noqa: E402
from .taps import HiddenTap  # noqa: E402

__all__ = ["HiddenTap", "StraightlineError", "load", "load_generated", "make_cache", "specialize"]
