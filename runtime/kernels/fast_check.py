"""How far the fast attention is from the true result, next to MLX's own operations on the same random inputs.

The true result is worked out in float32 from what the cache stores, by products and sums: no matmul, which may take
float32 for TF32 on a GPU. It is a thousand times closer to float64 than what is measured with it.
"""

import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .fast import LENGTHS, FastAttention
from .site import Call

# The most that rounding the true result to bfloat16 can be off.
BOUND = 2.0**-8
SLACK = 1.001  # of MLX's own error, where both round the same value


@dataclass(frozen=True)
class Errors:
    """Relative to the norm of the true result: of a call, and of MLX's operations."""

    length: int
    found: float
    plain: float

    @property
    def refused(self) -> str:
        """Why the call is not to be used; empty if it is within the bound and no worse than MLX's operations."""
        if not self.found <= BOUND:
            return f"its error over {self.length} rows is {self.found:.1e}, above the bound {BOUND:.1e}"
        if self.found > self.plain * SLACK + 1e-6:
            return f"its error over {self.length} rows is {self.found:.1e}, above that of MLX's {self.plain:.1e}"
        return ""


def errors(site: FastAttention, call: Call, lengths: tuple[int, ...] = LENGTHS) -> list[Errors]:
    """One for each length. Raises what the kernel raises."""
    found = []
    for seed, length in enumerate(lengths):
        inputs = site.inputs_of(length, seed)
        truth = reference(site, *inputs)
        found.append(Errors(length, error_of(call(*inputs), truth), plain_error(site, inputs, truth)))
    return found


def plain_error(site: FastAttention, inputs: tuple[Any, ...], truth: mx.array) -> float:
    """Of MLX's operations; infinite where it has no kernel for them on this device."""
    try:
        return error_of(site.plain(*inputs), truth)
    except RuntimeError as error:
        if site.bits and "No implementation" in str(error):
            return math.inf
        raise


def distance(found: Any, truth: mx.array) -> mx.array:
    """Of two results of one size, relative to the norm of the second."""
    difference: mx.array = found.reshape(-1).astype(mx.float32) - truth.reshape(-1)
    return _norm(difference) / _norm(truth)


def error_of(found: Any, truth: mx.array) -> float:
    value: Any = distance(found, truth).item()
    return float(value)


def _norm(x: mx.array) -> mx.array:
    return mx.sqrt((x * x).sum())


def reference(site: FastAttention, q: mx.array, k: Any, v: Any, rows: mx.array | None = None) -> mx.array:
    """float32 [heads * head_dim], one head after the other: so many products at once fill a GPU's memory."""
    k, v = _stored(site, k), _stored(site, v)
    count: Any = k.shape[2] if rows is None else rows.item()
    q = q.reshape(site.heads, 1, site.head_dim).astype(mx.float32)
    results = []
    for head in range(site.heads):
        keys, values = (one[0, head // site.repeats, :count].astype(mx.float32) for one in (k, v))
        scores = (q[head] * keys).sum(axis=-1)
        weights = mx.exp(scores - scores.max())
        results.append((weights[:, None] * values).sum(axis=0) / weights.sum())
        mx.eval(results[-1])
    return mx.concatenate(results)


def _stored(site: FastAttention, one: Any) -> mx.array:
    if not site.bits:
        values: mx.array = one
        return values
    packed, scales, biases = one
    return mx.dequantize(
        packed, scales.astype(mx.float32), biases.astype(mx.float32), group_size=site.group_size, bits=site.bits
    )
