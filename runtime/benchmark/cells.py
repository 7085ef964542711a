"""The cells of a benchmark: what one kind of call is. Pure."""

from dataclasses import dataclass
from itertools import product

Indices = tuple[int, ...]
WIDTHS = (2, 4, 8, 16)
CHUNK = 2048  # of a prompt, as in mlx_lm.generate


@dataclass(frozen=True)
class Cell:
    """One kind of call: ids [batch, width] after `context` tokens; or, if `prefill`, a prompt of that many tokens.

    taps: the indices of the hidden states that are kept, none for an untapped call. loop: the generation loop after a
    prompt of `context` tokens, in place of calls.
    """

    context: int = 0
    batch: int = 1
    width: int = 1
    prefill: int = 0
    taps: Indices = ()
    loop: bool = False

    @property
    def name(self) -> str:
        """In words, only what is not as in plain decoding."""
        words = [f"prefill {self.prefill}" if self.prefill else f"context {self.context}"]
        words += [f"batch {self.batch}"] * (self.batch > 1) + [f"width {self.width}"] * (self.width > 1)
        return ", ".join([*words, *["tapped"] * bool(self.taps), *["loop"] * self.loop])

    @property
    def tokens(self) -> int:
        """How many tokens one call takes in."""
        return self.batch * (self.prefill or self.width)


def grid(
    contexts: Indices, batches: Indices, widths: Indices, prefills: Indices, taps: Indices, loop: bool
) -> list[Cell]:
    """Every combination; then, if asked for, the loop at each context; the prompts last."""
    cells = [Cell(context, batch, width, 0, taps) for context, batch, width in product(contexts, batches, widths)]
    cells += [Cell(context, loop=True) for context in contexts if loop]
    return cells + [Cell(0, batch, 1, tokens, taps) for batch, tokens in product(batches, prefills)]


def suite(taps: Indices) -> list[Cell]:
    """The standard set: decoding at three contexts, batches, the widths of verification tapped and not, prompts."""
    cells = [Cell(512), Cell(512, loop=True), *(Cell(512, batch) for batch in (4, 16))]
    cells += [Cell(512, 1, width, 0, kept) for width in WIDTHS for kept in ((), taps)]
    cells += [Cell(0, 1, 1, tokens) for tokens in (2048, 8192)]
    return [*cells, Cell(4096), Cell(32768)]


def suite_taps(sentinel: int) -> Indices:
    """Where a drafter reads: three layers spread over the model, the last of them after the final norm."""
    return sentinel // 8, sentinel // 2, sentinel
