"""Attention of a block, [B, L] tokens at once, with a mask: as MLX fuses it, or as its fallback does it, written out.

Each takes q [B, heads, L, head_dim]; k, v as `views` makes them, once for all layers that share them, of what a cache
hands out, [B, kv_heads, rows, head_dim]; and a mask as `mask` makes it, once for all layers of a kind, of one that a
cache makes: None, "causal", or bool [rows], [L, rows] or [B, 1, L, rows].
"""

from functools import cache
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from .attention import Attention


class Fused:
    """Where MLX has fused attention, and where nothing is known."""

    def __init__(self, site: Attention) -> None:
        self.unit = site.unit

    def mask(self, mask: Any, batch: int, length: int) -> Any:
        return mask

    def views(self, k: Any, v: Any) -> tuple[Any, Any]:
        return k, v

    def __call__(self, mask: Any, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        """[B, L, heads * head_dim]."""
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=mask).transpose(0, 2, 1, 3)
        merged: mx.array = y.reshape(*y.shape[:2], self.unit)
        return merged


class Masks(dict[tuple[int, mx.Dtype], tuple[mx.array, mx.array]]):
    """By the number of rows and the dtype of the scores, made once: the mask, bool, and what stands where it is False.

    Both are shaped as the scores.

    "causal" is said of as many rows as each layer finds, the last of which are the block's own.
    """

    def __init__(self, mask: Any, shape: tuple[int, ...]) -> None:
        """shape: of the scores, without their rows."""
        super().__init__()
        self.mask, self.shape = mask, shape

    def __missing__(self, of: tuple[int, mx.Dtype]) -> tuple[mx.array, mx.array]:
        mask, (rows, dtype) = self.mask, of
        if type(mask) is str:
            length = self.shape[-1]
            mask = create_causal_mask(length, rows - length)
        shape = (*self.shape, mask.shape[-1])
        self[of] = made = mx.broadcast_to(mask, shape), mx.broadcast_to(_least(dtype), shape)
        return made


@cache
def _least(dtype: mx.Dtype) -> mx.array:
    return mx.array(mx.finfo(dtype).min, dtype)


class WrittenOut:
    """MLX's fallback without the product with a scale of 1, and without a view that another layer has made already."""

    def __init__(self, site: Attention) -> None:
        self.unit, self.head_dim = site.unit, site.head_dim
        self.heads = (site.kv_heads, site.repeats) if site.repeats > 1 else (site.heads,)

    def mask(self, mask: Any, batch: int, length: int) -> Masks | None:
        if isinstance(mask, mx.array) and mask.ndim > 2 and len(self.heads) > 1:
            mask = mx.expand_dims(mask, -3)
        return None if mask is None else Masks(mask, (batch, *self.heads, length))

    def views(self, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        if len(self.heads) == 1:
            return k.swapaxes(-1, -2), v
        batch, _, rows, _ = k.shape
        k = mx.expand_dims(k, 2).swapaxes(-1, -2)
        shape = (batch, *self.heads)
        return mx.broadcast_to(k, (*shape, self.head_dim, rows)), mx.broadcast_to(
            mx.expand_dims(v, 2), (*shape, rows, self.head_dim)
        )

    def __call__(self, masks: Masks | None, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        """[B, L, heads * head_dim]."""
        batch, _, length, _ = q.shape
        if len(self.heads) > 1:
            q = mx.unflatten(q, 1, self.heads)
        scores = q @ k
        if masks is not None:
            mask, least = masks[k.shape[-1], scores.dtype]
            scores = mx.where(mask, scores, least)
        y = mx.softmax(scores, axis=-1, precise=True) @ v
        if length > 1:
            y = y.transpose(0, 3, 1, 2, 4) if len(self.heads) > 1 else y.transpose(0, 2, 1, 3)
        merged: mx.array = y.reshape(batch, length, self.unit)
        return merged
