"""Numbers from a graph, from a list of times and from the device."""

import gc
import io
import re
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from ..decode_check import on_gpu

MOVED = {True: 1 << 31, False: 1 << 28}  # bytes of the array that shows the bandwidth, on a GPU and not
TRIES = 9
# Primitives that hand on their input's memory under another shape (mlx/backend/common, mlx/backend/gpu). Reshape,
# Flatten, Unflatten and View copy where strides leave no other way, which a graph does not tell.
VIEWS = frozenset(
    {
        *("AsStrided", "Broadcast", "BroadcastAxes", "Copy", "CustomTransforms", "Depends", "ExpandDims", "Flatten"),
        *("NumberOfElements", "Reshape", "Slice", "Split", "Squeeze", "StopGradient", "Transpose", "Unflatten", "View"),
    }
)


class Graph(NamedTuple):
    """Of the arrays of one call that are not evaluated yet. launching: the primitives that are more than a view."""

    primitives: int
    launching: int


class Spread(NamedTuple):
    """The quartiles of some numbers."""

    low: float
    median: float
    high: float


def spread(numbers: list[float]) -> Spread:
    if len(numbers) < 2:
        return Spread(numbers[0], numbers[0], numbers[0])
    return Spread(*statistics.quantiles(numbers, n=4, method="inclusive"))


def count_primitives(outputs: list[mx.array]) -> int:
    """How many primitives the graph of arrays that are not evaluated yet asks for."""
    return graph_of(outputs).primitives


def graph_of(outputs: list[mx.array]) -> Graph:
    text = io.StringIO()
    mx.export_to_dot(text, *outputs)
    # A compiled function is one primitive, named after all that it holds; some names are followed by a dtype.
    labels = re.findall(r'label\s*=\s*"([^"]*)",\s*shape\s*=\s*rectangle', text.getvalue())
    return Graph(len(labels), sum(label.partition(" ")[0] not in VIEWS for label in labels))


def bandwidth() -> tuple[float, str]:
    """Bytes per second of the device's memory, and how it was found: the faster of reading, and reading and writing."""
    size = MOVED[on_gpu()]
    array = mx.zeros((size // 4,), dtype=mx.float32)
    mx.eval(array)
    copied, read = _median_seconds(lambda one: one + 1, array), _median_seconds(mx.max, array)
    rate, how = max((2 * size / copied, "copy"), (size / read, "maximum"))
    return rate, f"{how} of {size >> 20} MiB"


def _median_seconds(act: Callable[[mx.array], mx.array], array: mx.array) -> float:
    seconds = []
    for _ in range(TRIES):
        started = time.perf_counter()
        mx.eval(act(array))
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def alive() -> int:
    """Bytes of arrays that are alive, nothing of them garbage."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    return int(mx.get_active_memory())
