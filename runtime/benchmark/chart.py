"""The chart of `straightline bench` as SVG, written by hand: one bar a cell, from 1.0 to the ratio. Pure."""

import math

from ..commands.drawing import FULL, GREY, INK, SLIDING, paper, words_at
from .rows import Row
from .sides import MLX_LM

ROW, TOP, LEFT, WIDE, RIGHT = 24, 96, 300, 480, 130


def chart(title: str, line: str, rows: list[Row]) -> str:
    """Bars start at 0, so that lengths compare; the line at 1.0 is mlx-lm; whiskers are the quartiles of the rounds.

    A side whose bytes differ has a bar only if the tier lets it, and is marked. rows: mlx-lm's own are left out.
    """
    rows = [row for row in rows if row.side != MLX_LM or row.problem]
    most = max([1.0, *(row.ratio.high for row in rows if row.ratio)])
    top = math.ceil(most * 2) / 2
    height = TOP + ROW * len(rows) + 40
    width = LEFT + WIDE + RIGHT
    parts = [
        *paper(width, height, title),
        words_at(24, 32, title, "font-size='16' font-weight='bold'"),
        words_at(24, 52, line, f"fill='{GREY}'"),
    ]
    bottom = TOP + ROW * len(rows)
    for half in range(int(top * 2) + 1):
        x = _x(half / 2, top)
        parts.append(f"<path d='M{x:.1f} {TOP - 6}V{bottom}' stroke='{GREY}' stroke-width='0.6' opacity='0.4'/>")
        parts.append(words_at(x, TOP - 12, f"x{half / 2:.1f}", f"fill='{GREY}' text-anchor='middle'"))
    several = len({row.side for row in rows if not row.problem}) > 1
    for number, row in enumerate(rows):
        parts += _bar(row, TOP + ROW * number, top, several)
    one = _x(1, top)
    parts.append(f"<path d='M{one:.1f} {TOP - 6}V{bottom + 6}' stroke='{INK}' stroke-width='1.4'/>")
    parts.append(words_at(one, bottom + 22, "mlx-lm", "text-anchor='middle'"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bar(row: Row, y: int, top: float, several: bool) -> list[str]:
    label = f"{row.cell.name}: {row.side}" if several and not row.problem else row.cell.name
    parts = [words_at(24, y + 13, label)]
    if row.ratio is None:
        why = "cannot be run" if row.problem else f"departs at {row.departs}"
        return [*parts, words_at(LEFT + 6, y + 13, f"no ratio: {why}", f"fill='{GREY}'")]
    low, middle, high = (_x(one, top) for one in row.ratio)
    colour = FULL if row.by_choice else SLIDING
    parts.append(f"<rect x='{LEFT}' y='{y}' width='{middle - LEFT:.1f}' height='{ROW - 7}' rx='2' fill='{colour}'/>")
    centre = y + (ROW - 7) / 2
    parts.append(
        f"<path d='M{low:.1f} {centre}H{high:.1f}M{low:.1f} {centre - 4}v8M{high:.1f} {centre - 4}v8' fill='none' "
        f"stroke='{INK}' stroke-width='1.1'/>"
    )
    words = f"x{row.ratio.median:.2f}{', bits differ' if row.by_choice else ''}"
    parts.append(words_at(max(middle, high) + 6, y + 13, words))
    return parts


def _x(ratio: float, top: float) -> float:
    return LEFT + WIDE * ratio / top
