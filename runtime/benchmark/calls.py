"""What is timed in a cell, for one side: blocks of tokens after a context, or a whole prompt.

Blocks: caches of the context are filled once a side, and copied before each round, outside of the timed part; within a
round they grow by a block a call. One token a row is asked for before the last one is read, as mlx-lm's loop does; a
wider block is read before the next is asked for, as whoever verifies a draft must.
"""

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import mlx.core as mx

from ..taps import HiddenTap
from .cells import Cell
from .measures import Graph, graph_of
from .sides import Side, blamed, read_prompt, with_own_arrays

WARM_UP = 2
WARM_UP_ALONE = 8  # single tokens: straightline settles on a cache after a few of them

Named = dict[str, mx.array]  # "logits" and "tap 5", not evaluated yet


class Parts(NamedTuple):
    """Seconds of one call by itself: building the graph, dispatching it, waiting for the device."""

    build: float
    dispatch: float
    wait: float


class Blocks:
    """ids [batch, width] after a context. filled: the caches of each side that hold it; they are not changed."""

    def __init__(self, cell: Cell, vocabulary: int, filled: dict[str, list[Any]]) -> None:
        self.filled = filled
        self.first = ids(cell.batch, cell.width, vocabulary, start=cell.context)
        self.ahead = cell.width == 1
        self.tap = tap_of(cell)

    def walk(self, sides: list[Side], steps: int) -> Iterator[dict[str, Named]]:
        """The outputs of all sides, for the greedy tokens of the first one."""
        caches = {side.name: with_own_arrays(self.filled[side.name]) for side in sides}
        block = self.first
        for _ in range(steps):
            found = {}
            for side in sides:
                with blamed(side):
                    found[side.name] = self._outputs(side, block, caches[side.name])
            yield found
            block = greedy(found[sides[0].name]["logits"])

    def seconds(self, side: Side, steps: int) -> float:
        """Of one call, the mean of so many in a row."""
        block, caches = self._warm(side)
        mx.synchronize()
        started = time.perf_counter()
        for _ in range(steps):
            outputs = self._outputs(side, block, caches)
            following = greedy(outputs["logits"])
            mx.async_eval(following, *outputs.values())  # type: ignore[no-untyped-call]
            mx.eval(block if self.ahead else following)
            block = following
        mx.eval(block)
        return (time.perf_counter() - started) / steps

    def parts(self, side: Side) -> Iterator[Parts]:
        block, caches = self._warm(side)
        while True:
            start = time.perf_counter()
            outputs = list(self._outputs(side, block, caches).values())
            built = time.perf_counter()
            mx.async_eval(outputs)  # type: ignore[no-untyped-call]
            dispatched = time.perf_counter()
            mx.synchronize()
            yield Parts(built - start, dispatched - built, time.perf_counter() - dispatched)

    def graph(self, side: Side) -> Graph:
        """Of one call."""
        block, caches = self._warm(side)
        return graph_of(list(self._outputs(side, block, caches).values()))

    def peak(self, side: Side) -> int:
        """The most bytes alive in four calls, all that is held for other reasons included."""
        block, caches = self._warm(side)
        mx.synchronize()
        mx.clear_cache()
        mx.reset_peak_memory()
        for _ in range(4):
            outputs = self._outputs(side, block, caches)
            mx.eval(list(outputs.values()))
        return int(mx.get_peak_memory())

    def _warm(self, side: Side) -> tuple[mx.array, list[Any]]:
        """Caches that some calls have gone through, and the block to go on with."""
        block, caches = self.first, with_own_arrays(self.filled[side.name])
        for _ in range(WARM_UP_ALONE if self.ahead else WARM_UP):
            outputs = self._outputs(side, block, caches)
            block = greedy(outputs["logits"])
            mx.eval(block, list(outputs.values()))
        return block, caches

    def _outputs(self, side: Side, block: mx.array, caches: list[Any]) -> Named:
        return named(side.call(block, caches, self.tap), self.tap)


class Prompt:
    """A prompt from nothing to the logits of its last token, in new caches."""

    def __init__(self, cell: Cell, vocabulary: int) -> None:
        self.ids = ids(cell.batch, cell.prefill, vocabulary)
        self.tap = tap_of(cell)

    def walk(self, sides: list[Side], steps: int) -> Iterator[dict[str, Named]]:
        """One step: a prompt has one end."""
        found = {}
        for side in sides:
            with blamed(side):
                found[side.name] = named(read_prompt(side, self.ids, side.caches(), self.tap), self.tap)
        yield found

    def seconds(self, side: Side, steps: int) -> float:
        started = time.perf_counter()
        for _ in range(steps):
            read_prompt(side, self.ids, side.caches(), self.tap)
        return (time.perf_counter() - started) / steps

    def parts(self, side: Side) -> Iterator[Parts]:
        return iter(())

    def graph(self, side: Side) -> None:
        return None

    def peak(self, side: Side) -> int:
        mx.synchronize()
        mx.clear_cache()
        mx.reset_peak_memory()
        read_prompt(side, self.ids, side.caches(), self.tap)
        return int(mx.get_peak_memory())


def ids(batch: int, length: int, vocabulary: int, start: int = 0) -> mx.array:
    """Token ids [batch, length], the same in every run, another row each."""
    positions = mx.arange(start, start + length)[None] + 104_729 * mx.arange(batch)[:, None]
    found: mx.array = positions * 7919 % vocabulary
    return found


def tap_of(cell: Cell) -> HiddenTap | None:
    return HiddenTap(cell.taps) if cell.taps else None


def named(logits: mx.array, tap: HiddenTap | None) -> Named:
    """In the order of the forward, so that the first one that differs says where the streams part."""
    found = {} if tap is None else {f"tap {index}": rows for index, rows in sorted(tap.captured.items())}
    return found | {"logits": logits}


def greedy(logits: mx.array) -> mx.array:
    """[B, L, vocabulary] to the next ids [B, L]."""
    following: mx.array = mx.argmax(logits, axis=-1)
    return following
