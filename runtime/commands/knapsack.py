"""Which bits for which layer: a greedy knapsack over measured losses. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Item:
    """One layer. numbers: how many it stores for a token. loss: KL divergence at each candidate number of bits."""

    layer: int
    numbers: int
    loss: Mapping[int, float]


def choose(items: tuple[Item, ...], target: float) -> dict[int, int]:
    """Layer to bits, with a mean over stored numbers of at most `target`.

    All layers start at the fewest bits. Then, again and again, the step up that saves most loss for each byte more, of
    those that still fit; a step may pass over candidates, since a measured loss need not fall at each of them.
    """
    bits = {item.layer: min(item.loss) for item in items}
    total = sum(item.numbers for item in items)
    room = target * total - sum(bits[item.layer] * item.numbers for item in items)
    while True:
        steps = [
            ((item.loss[bits[item.layer]] - item.loss[more]) / cost, -cost, -item.layer, item.layer, more)
            for item in items
            for more in item.loss
            if (cost := (more - bits[item.layer]) * item.numbers) > 0
            and cost <= room + 1e-9
            and item.loss[more] < item.loss[bits[item.layer]]
        ]
        if not steps:
            return bits
        _, cost_below_zero, _, layer, more = max(steps)
        room += cost_below_zero
        bits[layer] = more


def mean_bits(items: tuple[Item, ...], bits: Mapping[int, int]) -> float:
    """Weighted by how many numbers each layer stores for a token."""
    return sum(bits[item.layer] * item.numbers for item in items) / sum(item.numbers for item in items)
