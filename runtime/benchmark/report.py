"""The table of `straightline bench`: a line a side, as soon as its cell is done. The ratio comes first. Pure."""

from .measures import Spread
from .rows import Row

# Each column: its head, what stands below it, its width (0: as it comes).
COLUMNS = (
    ("cell", "", 30),
    ("side", "", 12),
    ("ratio", "median", 6),
    ("ratio", "quartiles", 9),
    ("ratio", "best/best", 9),
    ("tok/s", "median", 8),
    ("tok/s", "best", 8),
    ("build", "ms", 7),
    ("dispatch", "ms", 8),
    ("wait", "ms", 7),
    ("graph", "prims", 5),
    ("of them", "launching", 9),
    ("read", "a call", 8),
    ("of peak", "bandw.", 7),
    ("memory", "peak", 8),
    ("equal", "steps", 0),
)
HEADS, UNITS, WIDTHS = zip(*COLUMNS, strict=True)


def head() -> list[str]:
    return [_line(HEADS), _line(UNITS)]


def lines(rows: list[Row]) -> list[str]:
    """Of one cell; its name stands before its first side."""
    return [_row(row, row.cell.name if row is rows[0] else "") for row in rows]


def _row(row: Row, name: str) -> str:
    if row.problem:
        return f"{name:<{WIDTHS[0]}}  {row.side}: cannot be run: {row.problem}"
    if row.departs and not row.by_choice:
        return f"{name:<{WIDTHS[0]}}  {row.side:<{WIDTHS[1]}}  departs from mlx-lm at {row.departs}"
    parts = ["-"] * 3 if row.parts is None else [f"{1e3 * one:.2f}" for one in row.parts]
    return _line(
        (
            name,
            row.side,
            _times(row.ratio.median if row.ratio else None),
            _quartiles(row.ratio),
            _times(row.best_over_best),
            _number(row.rate.median if row.rate else None),
            _number(row.best),
            *parts,
            "-" if row.primitives is None else str(row.primitives),
            "-" if row.launching is None else str(row.launching),
            "-" if row.bytes_read is None else _size(row.bytes_read),
            "-" if row.share is None else f"{row.share:.0%}",
            "-" if row.peak is None else _size(row.peak),
            f"not bit-equal by choice, from {row.departs}" if row.by_choice else str(row.compared),
        )
    )


def _line(cells: tuple[str, ...]) -> str:
    """Words to the left, numbers to the right."""
    placed = [
        f"{cell:<{w}}" if at < 2 or not w else f"{cell:>{w}}"
        for at, (cell, w) in enumerate(zip(cells, WIDTHS, strict=True))
    ]
    return "  ".join(placed).rstrip()


def _size(count: int) -> str:
    """Four digits, since a peak one percent higher has to be seen."""
    scale, unit = (1e9, "GB") if count >= 1e8 else (1e6, "MB")
    return f"{count / scale:.4g} {unit}"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"x{ratio:.2f}"


def _quartiles(ratio: Spread | None) -> str:
    return "-" if ratio is None else f"{ratio.low:.2f}-{ratio.high:.2f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
