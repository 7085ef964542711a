"""What generated files import. The monolith owns the numbers: its own compiled primitives wherever it has one."""

from functools import partial
from typing import Any

import mlx.core as mx
from mlx.nn import gelu_approx
from mlx_lm.models.base import quantized_scaled_dot_product_attention
from mlx_lm.models.gemma4_text import geglu, logit_softcap
from mlx_lm.models.rope_utils import ProportionalRoPE

from .evaluation import evaluate
from .kv.device import PLAIN_ROWS
from .packed import PackedRows

__all__ = ["geglu", "gelu_approx", "logit_softcap", "proportional_freqs", "quantized_attention", "scaled_add"]


def attention_over_plain_rows(
    queries: mx.array, keys: Any, values: Any, *, scale: float, mask: Any, group_size: int, bits: int
) -> mx.array:
    """[B, heads, L, dim]: attention where quantized caches hand out plain rows. Takes (packed, scales, biases), too."""
    if isinstance(keys, tuple):
        keys, values = (_plain(rows, group_size, bits) for rows in (keys, values))
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


def _plain(rows: Any, group_size: int, bits: int) -> mx.array:
    packed, scales, biases = rows
    return mx.dequantize(packed, scales, biases, group_size, bits)


_attention = attention_over_plain_rows if PLAIN_ROWS else quantized_scaled_dot_product_attention


def quantized_attention(
    queries: mx.array, keys: Any, values: Any, *, scale: float, mask: Any, group_size: int, bits: int
) -> mx.array:
    """Attention over what a quantized cache hands out. In the fast tier keys know how they are attended to."""
    if type(keys) is PackedRows:
        return keys.attention(queries, keys, values)
    y: mx.array = _attention(queries, keys, values, scale=scale, mask=mask, group_size=group_size, bits=bits)
    return y


@partial(mx.compile, shapeless=True)
def scaled_add(x: mx.array, y: mx.array, scale: mx.array) -> mx.array:
    """`(x + y) * scale` in one kernel. An add before a multiply cannot be contracted, so the bits stay."""
    return (x + y) * scale


def proportional_freqs(*, dims: int, rotated: int, base: float, factor: float) -> mx.array:
    """float32 [dims / 2]: the monolith's own array of proportional RoPE, infinite where nothing turns."""
    freqs: mx.array = ProportionalRoPE(dims, rotated, base=base, factor=factor)._freqs
    # Left lazy, it would belong to the thread that imports the file, and a bind in another would fail.
    evaluate(freqs)
    return freqs
