"""`load`: mlx_lm.load, then specialize."""

from typing import Any

import mlx_lm

from .model import specialize


def load(path_or_hf_repo: str, *args: Any, strict: bool = False, **kwargs: Any) -> Any:
    """A specialized model and its tokenizer, from a folder or a hub id. Other arguments go to `mlx_lm.load`."""
    model, *rest = mlx_lm.load(str(path_or_hf_repo), *args, **kwargs)
    return (specialize(model, strict=strict), *rest)
