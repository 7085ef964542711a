"""What MLX holds. Tests that compare it to the byte use the fixture `exact_memory`."""

import gc

import mlx.core as mx


def settled() -> int:
    """Active memory in bytes, with nothing waiting to be freed."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    return mx.get_active_memory()
