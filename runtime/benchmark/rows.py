"""Row: what was found of one side in one cell, as plain numbers for a program."""

from dataclasses import asdict, dataclass
from typing import Any

from .calls import Parts
from .cells import Cell
from .measures import Spread


@dataclass(frozen=True)
class Row:
    """ratio: mlx-lm's time of a call over this side's, round by round; None where the bytes differ and may not.

    departs: the first output that differs from mlx-lm's, or "". by_choice: it differs, and the tier lets it.
    problem: why the cell could not be run, or ""; `side` is then the one that failed, or "none".
    rate and best: tokens a second. primitives and launching: as measures.Graph says. bytes_read: of a call.
    share: of the device's bandwidth. peak: bytes.
    """

    cell: Cell
    side: str
    departs: str = ""
    by_choice: bool = False
    compared: int = 0
    ratio: Spread | None = None
    best_over_best: float | None = None
    rate: Spread | None = None
    best: float | None = None
    rounds: int = 0
    primitives: int | None = None
    launching: int | None = None
    parts: Parts | None = None
    bytes_read: int | None = None
    share: float | None = None
    peak: int | None = None
    problem: str = ""

    def plain(self) -> dict[str, Any]:
        """For JSON: named tuples as objects, seconds of the parts as milliseconds."""
        found = asdict(self) | {"name": self.cell.name}
        for name in ("ratio", "rate"):
            spread = getattr(self, name)
            found[name] = None if spread is None else spread._asdict()
        found["parts"] = None if self.parts is None else {k: 1e3 * v for k, v in self.parts._asdict().items()}
        return found
