"""The comparison compared: one bit of one weight is changed on the generated side, and must be seen at that layer."""

from typing import Any

from ..arrays import bits
from .walks import Row, Walk, run_walk


def control(oracle: Any, model: Any, vocab: int) -> Row:
    """One weight of the generated path one step in its last bit away: the comparison must see it."""
    spoil(model)
    (row,) = run_walk(Walk((("prefill", (16,)),)), oracle, model, vocab, seed=99)
    expected = f"tap {len(oracle.layers) - 1} "
    missed = "" if expected in row.departs else f"expected a departure at {expected}, found {row.departs or 'none'}"
    return Row("control: one bit of one weight", missed, row.seconds, "seen")


def spoil(model: Any) -> None:
    weights = model._bound.weights
    spoiled = bits(weights.layers[-1].layer_scalar) + 1
    for each in (weights, weights.single):  # forward's and decode's
        each.layers[-1].layer_scalar = spoiled.view(each.layers[-1].layer_scalar.dtype)
