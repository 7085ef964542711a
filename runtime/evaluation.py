"""Evaluating arrays of a model, where a trace of mx.compile may be under way."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .handover import wait_for_handover


def evaluate(arrays: Any) -> bool:
    """mx.eval; False inside mx.compile, where nothing has a value yet. No other thread evaluates meanwhile."""
    return _outside_traces(mx.eval, arrays)


def start(arrays: Any) -> bool:
    """mx.async_eval; False inside mx.compile."""
    return _outside_traces(mx.async_eval, arrays)


def _outside_traces(call: Callable[..., Any], arrays: Any) -> bool:
    wait_for_handover()
    try:
        call(arrays)
    except ValueError as error:
        if "transformation" not in str(error):
            raise
        return False
    return True


def evaluate_hidden(root: nn.Module) -> None:
    """Evaluates arrays under underscore names (RoPE's `_freqs`), which `mx.eval(model.parameters())` passes over.

    Left lazy, they belong to the loading thread's stream, and the first forward in another thread fails.
    """
    evaluate([value for module in root.modules() for key, value in module.items() if key.startswith("_")])
