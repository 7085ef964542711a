"""Fixtures that pytest finds by name."""

import gc
from collections.abc import Iterator

import mlx.core as mx
import pytest


@pytest.fixture
def exact_memory() -> Iterator[None]:
    """MLX keeps no freed buffers.

    One taken from its cache counts at its own size, which may be larger than the array's: active memory would then
    depend on which buffer happened to be free.
    """
    limit = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(limit)


@pytest.fixture
def keys_as_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """RoPE on the CPU leaves keys head by head where values lie token by token; on CUDA both lie alike."""
    monkeypatch.setattr("straightline.runtime.bound.mixed", lambda caches, found: False)


def pytest_collection_finish() -> None:
    """What has been imported by now is never garbage, and there is enough of it to make each collection slow."""
    gc.collect()
    gc.freeze()
