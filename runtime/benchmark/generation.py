"""Generation of one prompt by each side's own loop: mlx_lm's `generate_step`, and straightline's."""

import time
from collections.abc import Iterator
from itertools import islice

import mlx.core as mx

from ..decoding.loop import STEPS
from .calls import Named, Parts, ids
from .cells import Cell
from .sides import Side, blamed

WARM_UP = 1 + 2 + 4  # the reads of 1, 2 and 4; from then on STEPS at once


class Generation:
    """The tokens after a prompt. The prompt itself, and the tokens until the loop is in its stride, are not timed."""

    def __init__(self, cell: Cell, vocabulary: int) -> None:
        self.prompt = ids(1, cell.context, vocabulary)[0]

    def walk(self, sides: list[Side], steps: int) -> Iterator[dict[str, Named]]:
        """Token and log-probabilities of each step. One loop after the other: each has the device to itself."""
        found = {}
        for side in sides:
            with blamed(side):
                found[side.name] = [_outputs(*one) for one in self._tokens(side, steps)]
        for step in range(steps):
            yield {name: outputs[step] for name, outputs in found.items()}

    def seconds(self, side: Side, steps: int) -> float:
        """Of one token, the mean of whole blocks."""
        count = max(1, steps // STEPS) * STEPS
        tokens = self._tokens(side, WARM_UP + count)
        for _ in islice(tokens, WARM_UP):
            pass
        started = time.perf_counter()
        for _ in tokens:
            pass
        return (time.perf_counter() - started) / count

    def parts(self, side: Side) -> Iterator[Parts]:
        return iter(())

    def graph(self, side: Side) -> None:
        return None

    def peak(self, side: Side) -> int:
        """The most bytes alive in a block after the prompt."""
        tokens = self._tokens(side, WARM_UP + STEPS)
        for _ in islice(tokens, WARM_UP):
            pass
        mx.clear_cache()
        mx.reset_peak_memory()
        for _ in tokens:
            pass
        return int(mx.get_peak_memory())

    def _tokens(self, side: Side, count: int) -> Iterator[tuple[int, mx.array]]:
        assert side.loop is not None
        return side.loop(self.prompt, count)


def _outputs(token: int, logprobs: mx.array) -> Named:
    mx.eval(logprobs)
    return {"log-probabilities": logprobs, "token": mx.array(token)}
