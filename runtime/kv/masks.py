"""Masks of the rollback layout, from positions alone. One is made per forward and shared by every layer of a kind."""

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask


def mask_over_slots(start: int, length: int, window: int, capacity: int) -> mx.array:
    """bool [length, slots]: what each new token sees of rows that lie at slot = position mod capacity.

    start: position of the first new token. slots: `start + length`, at most `capacity`.
    A slot that holds a token which was taken back counts as the older position that it would hold without it; that one
    lies outside every window as long as at most `capacity - window + 1` tokens are taken back.
    """
    end = start + length
    if end <= capacity:
        mask: mx.array = create_causal_mask(length, start, window_size=window)
        return mask
    # How many tokens lie between the row in a slot and the newest one.
    age = ((end - 1) % capacity - mx.arange(capacity)) % capacity
    if length > 1:
        age = age[None] - mx.arange(length - 1, -1, -1)[:, None]
        return (age >= 0) & (age < window)
    return (age < window)[None]


def mask_over_chunk(before: int, length: int, window: int) -> mx.array:
    """bool [length, before + length]: the rows before the chunk in order of time, then the chunk."""
    mask: mx.array = create_causal_mask(length, before, window_size=window)
    return mask
