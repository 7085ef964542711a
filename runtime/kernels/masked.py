"""Attention of a block, [B, L] tokens at once, with a mask: as MLX fuses it, or as its fallback does it, written out.

Each takes q [B, heads, L, head_dim]; k, v as `views` makes them, once for all layers that share them, of what a cache
hands out, [B, kv_heads, rows, head_dim]; and a mask as `mask` makes it, once for all layers of a kind.
"""

from typing import Any

import mlx.core as mx

from .attention import Attention


class Fused:
    """Where MLX has fused attention, and where nothing is known."""

    takes_arrays = False  # of masks: only those that cannot be said in a word

    def __init__(self, site: Attention, dtype: mx.Dtype) -> None:
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


class WrittenOut:
    """MLX's fallback without the product with a scale of 1, and without a view that another layer has made already."""

    takes_arrays = True

    def __init__(self, site: Attention, dtype: mx.Dtype) -> None:
        self.unit, self.head_dim = site.unit, site.head_dim
        self.heads = (site.kv_heads, site.repeats) if site.repeats > 1 else (site.heads,)
        self.least = mx.array(mx.finfo(dtype).min, dtype)

    def mask(self, mask: mx.array | None, batch: int, length: int) -> tuple[mx.array, mx.array] | None:
        """The mask, bool [L, rows] or [B, 1, L, rows], and what stands where it is False, both shaped as the scores."""
        if mask is None:
            return None
        if mask.ndim > 2 and len(self.heads) > 1:
            mask = mx.expand_dims(mask, -3)
        shape = (batch, *self.heads, length, mask.shape[-1])
        return mx.broadcast_to(mask, shape), mx.broadcast_to(self.least, shape)

    def views(self, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        if len(self.heads) == 1:
            return k.swapaxes(-1, -2), v
        batch, _, rows, _ = k.shape
        k = mx.expand_dims(k, 2).swapaxes(-1, -2)
        shape = (batch, *self.heads)
        return mx.broadcast_to(k, (*shape, self.head_dim, rows)), mx.broadcast_to(
            mx.expand_dims(v, 2), (*shape, rows, self.head_dim)
        )

    def __call__(self, mask: tuple[mx.array, mx.array] | None, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        """[B, L, heads * head_dim]."""
        batch, _, length, _ = q.shape
        if len(self.heads) > 1:
            q = mx.unflatten(q, 1, self.heads)
        scores = q @ k
        if mask is not None:
            scores = mx.where(mask[0], scores, mask[1])
        y = mx.softmax(scores, axis=-1, precise=True) @ v
        if length > 1:
            y = y.transpose(0, 3, 1, 2, 4) if len(self.heads) > 1 else y.transpose(0, 2, 1, 3)
        merged: mx.array = y.reshape(batch, length, self.unit)
        return merged
