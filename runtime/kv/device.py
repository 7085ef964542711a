"""What this MLX's backend makes of packed keys and values, and how a cache is therefore to hand them out."""

from typing import Any

import mlx.core as mx

# On CUDA, MLX 0.32 multiplies query heads that share a KV head by the rows of the first one, whichever is theirs, and
# raises "No implementation for problem shape" where rows are a slice of an allocation, as those of a cache are until it
# is full. So there caches store rows packed and hand them out as plain ones, which any attention takes.
PLAIN_ROWS = mx.cuda.is_available()


def packing(cache: Any) -> tuple[int | None, int | None]:
    """Bits and group size that a cache stores its rows with, ours or mlx-lm's; None for plain ones."""
    own = getattr(cache, "stored", cache)
    return getattr(own, "bits", None), getattr(own, "group_size", None)
