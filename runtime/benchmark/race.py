"""One cell after the other: bits compared, then short rounds that take turns, then memory, one side at a time."""

import gc
import time
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import mlx.core as mx

from ..arrays import same_bits
from .calls import Blocks, Parts, Prompt, ids
from .cells import Cell
from .generation import Generation
from .measures import alive, spread
from .models import Pair
from .rows import Row
from .sides import CONTROL, MLX_LM, Side, blamed, fill
from .traffic import bytes_read

Calls = Blocks | Prompt | Generation
SINGLE = 15  # calls by themselves, for build, dispatch and wait
FEWEST = 3  # rounds, whatever the budget
SHARES = 16  # rounds that a budget is cut into
FOR_ROUNDS = 0.75  # of a budget
PEAKS = 6  # the lowest counts: how late MLX lets go of an array is a matter of timing


@dataclass(frozen=True)
class Plan:
    """steps: compared first. tokens: calls of a round, at most. rounds: without a budget. seconds: budget of a cell."""

    steps: int
    tokens: int
    rounds: int
    seconds: float | None


class Bench:
    """All cells of one pair of models. sides: mlx-lm's first. bandwidth: bytes a second of the device."""

    def __init__(self, pair: Pair, plan: Plan, sides: list[Side], tier: str, bandwidth: float) -> None:
        self.pair = pair
        self.plan = plan
        self.sides = sides
        self.by_choice = tier != "exact"
        self.bandwidth = bandwidth
        self.filled: dict[str, list[Any]] = {}
        self.held = 0
        self._filled_for: tuple[int, int] | None = None

    def rows(self, cell: Cell) -> list[Row]:
        """One a side; one that says why, if the cell cannot be run."""
        try:
            return self._rows(cell)
        except Exception as error:  # the other cells may still tell something
            self._let_go()
            return [Row(cell, "".join(getattr(error, "__notes__", [])) or "none", problem=_first_line(error))]

    def _rows(self, cell: Cell) -> list[Row]:
        calls = self._calls(cell)
        sides = [side for side in self.sides if side.takes(cell)]
        started = time.perf_counter()
        departs, compared = self._compare(calls, sides)
        seconds = self._rounds(calls, sides, started)
        rows = []
        for side in sides:
            with blamed(side):
                row = Row(cell, side.name, departs=departs[side.name], compared=compared)
                rows.append(self._measured(row, calls, side, seconds))
        return rows

    def _measured(self, row: Row, calls: Calls, side: Side, seconds: dict[str, list[float]]) -> Row:
        mine, base = seconds[side.name], seconds[self.sides[0].name]
        tries = SINGLE if self.plan.seconds is None else max(3, min(SINGLE, int(0.1 * self.plan.seconds / mine[0])))
        parts = list(islice(calls.parts(side), tries))
        tokens = row.cell.tokens
        read = None if row.cell.prefill else bytes_read(self.pair.oracle, self.pair.spec, row.cell)
        graph = calls.graph(side)
        counted = not row.departs or self.by_choice
        return replace(
            row,
            by_choice=bool(row.departs) and self.by_choice,
            ratio=spread([theirs / own for own, theirs in zip(mine, base, strict=True)]) if counted else None,
            best_over_best=min(base) / min(mine) if counted else None,
            rate=spread([tokens / one for one in mine]),
            best=tokens / min(mine),
            rounds=len(mine),
            primitives=None if graph is None else graph.primitives,
            launching=None if graph is None else graph.launching,
            parts=Parts(*(spread(list(column)).median for column in zip(*parts, strict=True))) if parts else None,
            bytes_read=read,
            share=None if read is None else read / spread(mine).median / self.bandwidth,
            peak=self._peak(calls, side),
        )

    def _peak(self, calls: Calls, side: Side) -> int:
        """As if the side were alone: without the filled caches that rounds start from, and mlx-lm's without ours."""
        gc.collect()
        own = self.pair.own_bytes if side.name in (MLX_LM, CONTROL) else 0
        return min(calls.peak(side) for _ in range(PEAKS)) - self.held - own

    def _compare(self, calls: Calls, sides: list[Side]) -> tuple[dict[str, str], int]:
        """Where each side departs from mlx-lm, or empty; and how many steps were compared."""
        departs = {side.name: "" for side in sides}
        compared = 0
        for step, found in enumerate(calls.walk(sides, self.plan.steps)):
            for side in sides:
                with blamed(side):
                    mx.eval(list(found[side.name].values()))
                if not departs[side.name]:
                    departs[side.name] = _departure(found[sides[0].name], found[side.name], step)
            compared += 1
        return departs, compared

    def _rounds(self, calls: Calls, sides: list[Side], started: float) -> dict[str, list[float]]:
        """Seconds of a call, for each side one number a round. The order changes with every round."""
        once = {side.name: _timed(calls, side, 1) for side in sides}  # warms up what is timed
        steps, until = self.plan.tokens, None
        if self.plan.seconds is not None:
            until = started + FOR_ROUNDS * self.plan.seconds
            left = max(0.0, until - time.perf_counter())
            steps = max(1, min(steps, int(left / SHARES / sum(once.values()))))
        if isinstance(calls, Prompt):
            steps = 1
        seconds: dict[str, list[float]] = {side.name: [] for side in sides}
        done = 0
        while done < FEWEST or (done < self.plan.rounds if until is None else time.perf_counter() < until):
            turn = done % len(sides)
            for side in sides[turn:] + sides[:turn]:
                seconds[side.name].append(_timed(calls, side, steps))
            done += 1
        return seconds

    def _calls(self, cell: Cell) -> Calls:
        if not cell.prefill and not cell.loop:
            return self._blocks(cell)
        self._let_go()
        vocabulary = self.pair.spec.vocab_size
        return Generation(cell, vocabulary) if cell.loop else Prompt(cell, vocabulary)

    def _blocks(self, cell: Cell) -> Blocks:
        if self._filled_for != (cell.context, cell.batch):
            self._let_go()
            before = alive()
            prompt = ids(cell.batch, cell.context, self.pair.spec.vocab_size)
            for side in self.sides:
                with blamed(side):
                    caches = side.caches()
                    fill(side, prompt, caches)
                    self.filled[side.name] = caches
            self.held = alive() - before
            self._filled_for = (cell.context, cell.batch)
        return Blocks(cell, self.pair.spec.vocab_size, self.filled)

    def _let_go(self) -> None:
        self.filled, self.held, self._filled_for = {}, 0, None
        gc.collect()
        mx.clear_cache()


def _timed(calls: Calls, side: Side, steps: int) -> float:
    with blamed(side):
        return calls.seconds(side, steps)


def _departure(expected: dict[str, mx.array], found: dict[str, mx.array], step: int) -> str:
    """The first output whose bytes differ: "step 3: tap 17"."""
    different = (name for name in expected if name not in found or not same_bits(found[name], expected[name]))
    name = next(different, "")
    return f"step {step}: {name}" if name else ""


def _first_line(error: Exception) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return line if type(error).__name__ in ("StraightlineError", "RuntimeError") else f"{type(error).__name__}: {line}"
