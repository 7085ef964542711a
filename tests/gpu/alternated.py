"""A small difference in time between ways that take turns. Pure.

A block is eight rounds of four ways in a mirrored order, so that a host that slows down or speeds up steadily adds the
same to each of them. A ratio a block, the median of the ratios, and an interval for that median by bootstrap.
"""

import random
import statistics
from typing import NamedTuple

# Positions of the base, the first and the second way, the base again. Each way's two positions have the same mean.
ORDERS = ((0, 1, 3, 2, 2, 3, 1, 0), (3, 2, 0, 1, 1, 0, 2, 3))
CONFIDENCE = 0.95


class Interval(NamedTuple):
    """The median, and between what it lies with 95 per cent confidence."""

    low: float
    median: float
    high: float

    @property
    def half(self) -> float:
        return (self.high - self.low) / 2


def order(block: int) -> tuple[int, ...]:
    """Which of the four ways has each of the block's rounds: the neighbours change from block to block."""
    return ORDERS[block % 2]


def interval(numbers: list[float], samples: int = 1000) -> Interval:
    """Of the median, by the percentiles of the medians of samples drawn with replacement. The same at every call."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(numbers, k=len(numbers))) for _ in range(samples))
    tail = round(samples * (1 - CONFIDENCE) / 2)
    return Interval(medians[tail], statistics.median(numbers), medians[-1 - tail])
