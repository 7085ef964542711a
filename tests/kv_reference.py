"""What the tests of the KV caches compare with: dense attention over the true history, in numpy, float32.

It knows positions and a window. It knows nothing of slots, rings or rollback.
"""

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import scaled_dot_product_attention

from straightline.runtime.kv.device import packing

HEADS, DIM = 2, 32
Rows = tuple[mx.array, mx.array]


def random_rows(rng: np.random.Generator, length: int) -> Rows:
    """Keys and values float32 [1, HEADS, length, DIM]."""
    keys, values = (mx.array(rng.standard_normal((1, HEADS, length, DIM)).astype(np.float32)) for _ in range(2))
    return keys, values


def join(parts: list[Rows]) -> Rows:
    keys, values = (mx.concatenate(list(one), axis=2) for one in zip(*parts, strict=True))
    return keys, values


def cut(rows: Rows, start: int, end: int) -> Rows:
    return rows[0][:, :, start:end], rows[1][:, :, start:end]


def stored(rows: Rows, cache: Any) -> Rows:
    """The rows as a cache of these bits gives them back."""
    bits, group_size = packing(cache)
    if bits is None:
        return rows
    keys, values = (mx.dequantize(*mx.quantize(one, group_size, bits), group_size, bits) for one in rows)
    return keys, values


def attend(cache: Any, queries: mx.array, rows: Rows, window: int | None) -> mx.array:
    """One attention as mlx-lm makes it: the mask first, then the update, then its own attention function."""
    mask = cache.make_mask(queries.shape[2], return_array=False, window_size=window)
    keys, values = cache.update_and_fetch(*rows)
    # A copy of the queries: mlx-lm's quantized attention scales those that it is given, in place.
    result: mx.array = scaled_dot_product_attention(queries[...], keys, values, cache=cache, scale=0.25, mask=mask)
    return result


def dense(queries: mx.array, history: Rows, window: int | None) -> np.ndarray:
    """The last tokens of the history are those of the queries; float32 [1, heads, L, DIM]."""
    q, k, v = (np.array(one, dtype=np.float32)[0] for one in (queries, *history))
    k, v = (np.repeat(one, q.shape[0] // HEADS, axis=0) for one in (k, v))
    length, total = q.shape[1], k.shape[1]
    position = np.arange(total - length, total)[:, None]
    seen = np.arange(total)[None] <= position
    if window is not None:
        seen &= np.arange(total)[None] > position - window
    scores = np.where(seen, q @ k.transpose(0, 2, 1) * np.float32(0.25), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True) @ v)[None]
