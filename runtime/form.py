"""The form of a model's parameters: what a check of kernels, once passed, holds for."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .watch import plain_class
from .weights import floating


def form_of(text: nn.Module) -> int:
    """Of what a check of kernels holds for: the class, the quantization and the dtypes of every module."""
    return hash(
        tuple(
            (
                plain_class(module),
                getattr(module, "bits", 0),
                getattr(module, "group_size", 0),
                *map(_dtype, module.values()),
            )
            for module in text.modules()
        )
    )


def stream_dtype(text: nn.Module) -> mx.Dtype:
    """The one dtype of all floating parameters; float32 if they mix, which no kernel is made for."""
    dtypes = floating(text)
    return dtypes.pop() if len(dtypes) == 1 else mx.float32


def _dtype(value: Any) -> Any:
    return value.dtype if isinstance(value, mx.array) else None
