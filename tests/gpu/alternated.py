"""A small difference in time between ways that take turns. Pure.

A turn is one short round of each of four ways. Over four turns each way has had each place once, so that a host that
slows down or speeds up steadily adds the same to all; and each has followed each other one once, for what a way may
leave behind. Compared are single rounds of one turn: where two ways are alike, either is as likely to be the slower
one, hiccups or not. The median of the ratios, and an interval for it by bootstrap.
"""

import random
import statistics
from itertools import chain
from typing import NamedTuple

TURNS = ((0, 1, 3, 2), (1, 2, 0, 3), (2, 3, 1, 0), (3, 0, 2, 1))
CONFIDENCE = 0.95


class Interval(NamedTuple):
    """The median, and between what it lies with 95 per cent confidence."""

    low: float
    median: float
    high: float

    @property
    def half(self) -> float:
        return (self.high - self.low) / 2


def order(turn: int) -> tuple[int, ...]:
    """Of the four ways in this turn."""
    return TURNS[turn % 4]


def slower(way: list[float], bases: list[list[float]]) -> list[tuple[float, ...]]:
    """By what share a way is slower than each of the bases, turn by turn. All: seconds of the rounds."""
    return [
        tuple(mine / theirs - 1 for theirs in others)
        for mine, others in zip(way, zip(*bases, strict=True), strict=True)
    ]


def interval(turns: list[tuple[float, ...]], samples: int = 1000) -> Interval:
    """Of the median of all numbers, by the medians of samples of turns drawn with replacement. No chance in it."""
    draw = random.Random(0)
    medians = sorted(median(draw.choices(turns, k=len(turns))) for _ in range(samples))
    tail = round(samples * (1 - CONFIDENCE) / 2)
    return Interval(medians[tail], median(turns), medians[-1 - tail])


def median(turns: list[tuple[float, ...]]) -> float:
    return statistics.median(chain.from_iterable(turns))
