"""mlx-lm's own forward, tapped: its loop runs unchanged over layers and a final norm that report what they return."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma4_text

from .taps import Tap


class _Entry:
    """Index -1: the scaled embedding, on its way to the per-layer inputs (where there are any) and to layer 0."""

    def __init__(self, tap: Tap) -> None:
        self._tap = tap
        self._tapped: mx.array | None = None

    def __call__(self, x: mx.array) -> mx.array:
        if self._tapped is None:
            self._tapped = self._tap(-1, x)
        return self._tapped


class _TappedLayer:
    """Stands in for a decoder layer in mlx-lm's loop, which reads its `layer_type` and calls it."""

    def __init__(self, index: int, layer: nn.Module, tap: Tap, entry: _Entry) -> None:
        self.layer_type = layer.layer_type
        self._index = index
        self._layer = layer
        self._tap = tap
        self._entry = entry

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        if self._index == 0:
            x = self._entry(x)
        hidden, *rest = self._layer(x, *args, **kwargs)
        return (self._tap(self._index, hidden), *rest)


def tapped_text_model(text: nn.Module, tap: Tap) -> nn.Module:
    """A copy of an mlx-lm text model, sharing all arrays, whose layers and final norm go through `tap`."""
    inner = text["model"]
    entry = _Entry(tap)
    layers = [_TappedLayer(index, layer, tap, entry) for index, layer in enumerate(inner["layers"])]
    norm, projection = inner["norm"], inner.get("per_layer_model_projection")
    replaced = {"layers": layers, "norm": lambda x: tap(len(layers), norm(x))}
    if projection is not None:
        replaced["per_layer_model_projection"] = lambda x: projection(entry(x))
    tapped = _shell(inner, **replaced)
    return _shell(text, model=tapped)


def call_text_model(text: nn.Module, inputs: mx.array | None, tap: Tap, **kwargs: Any) -> mx.array:
    logits: mx.array = gemma4_text.Model.__call__(tapped_text_model(text, tap), inputs, **kwargs)
    return logits


def _shell(module: Any, **replaced: Any) -> Any:
    """A shallow copy with some entries replaced, made without running any of the module's own methods."""
    kind: Any = type(module)
    copy = kind.__new__(kind)
    copy.__dict__.update(module.__dict__)
    dict.update(copy, module, **replaced)
    return copy
