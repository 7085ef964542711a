"""Makes straightline's caches known to mlx-lm's `load_prompt_cache`, which looks classes up among its own names."""

from typing import Any

from mlx_lm.models import cache as mlx_lm_cache


def register(*classes: Any) -> None:
    """Put the classes beside mlx-lm's own. A name that is taken by something else is an ImportError, never replaced."""
    for one in classes:
        known = vars(mlx_lm_cache).setdefault(one.__name__, one)
        if known is not one:
            raise ImportError(f"mlx_lm.models.cache has its own {one.__name__}; expected none of that name")
