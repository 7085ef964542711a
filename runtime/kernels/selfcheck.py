"""Is a kernel exact here? Random inputs at the real sizes, the bytes of both forms compared on the device."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..arrays import bits
from .site import Call, Site

SEVERAL_ROWS = 3


@dataclass(frozen=True)
class Comparison:
    """values: how many were compared. differs: where the first difference is, or ""."""

    values: int
    differs: str = ""


def compare(site: Site, call: Call, dtype: mx.Dtype, seeds: int, rows: int = 1) -> Comparison:
    """Stops at the first seed that differs. Raises what the kernel raises."""
    values, call = 0, site.observed(call)
    for seed in range(seeds):
        inputs = site.inputs(seed, rows, dtype)
        pairs = list(zip(_listed(site.plain(*inputs)), _listed(call(*inputs)), strict=True))
        for index, (plain, kernel) in enumerate(pairs):
            if plain.shape != kernel.shape or plain.dtype != kernel.dtype:
                found = f"{kernel.dtype} {list(kernel.shape)}, expected {plain.dtype} {list(plain.shape)}"
                return Comparison(values, f"output {index} is {found}")
        counts = [different(plain, kernel) for plain, kernel in pairs]
        mx.eval(counts)
        for index, (count, (plain, _)) in enumerate(zip(counts, pairs, strict=True)):
            values += plain.size
            if count.item():
                many = "" if rows == 1 else f", {rows} rows"
                return Comparison(
                    values, f"{count.item()} of {plain.size} values differ (output {index}, seed {seed}{many})"
                )
    return Comparison(values)


def different(a: mx.array, b: mx.array) -> mx.array:
    """How many values are not the same bytes."""
    return (bits(a) != bits(b)).sum()


def _listed(outputs: Any) -> list[mx.array]:
    return [outputs] if isinstance(outputs, mx.array) else list(outputs)
