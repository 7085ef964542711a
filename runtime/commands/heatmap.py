"""The picture of `straightline kv-sensitivity`: layers down, bits across, the chosen bits framed. Pure."""

import math
from xml.sax.saxutils import escape

from .drawing import FONT, FULL, GREY, INK, PAPER, SLIDING
from .knapsack import Item

CELL, ROW, TOP, LEFT = 92, 19, 96, 132
LOW, HIGH = (243, 240, 252), (94, 43, 168)


def heatmap(title: str, line: str, items: tuple[Item, ...], sliding: frozenset[int], chosen: dict[int, int]) -> str:
    """The darker, the more the output changes when that layer alone has those bits."""
    candidates = sorted(items[0].loss)
    losses = [max(loss, 1e-12) for item in items for loss in item.loss.values()]
    low, high = math.log10(min(losses)), math.log10(max(losses))
    width = max(LEFT + CELL * len(candidates) + 40, 620)
    height = TOP + ROW * len(items) + 24
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' viewBox='0 0 {width} {height}' "
        f"role='img' {FONT} fill='{INK}'>",
        f"<title>{escape(title)}</title>",
        f"<rect width='{width}' height='{height}' rx='8' fill='{PAPER}'/>",
        f"<text x='24' y='32' font-size='16' font-weight='bold'>{escape(title)}</text>",
        f"<text x='24' y='52' fill='{GREY}'>{escape(line)}</text>",
        f"<text x='24' y='{TOP - 12}' fill='{GREY}'>layer</text>",
    ]
    for column, bits in enumerate(candidates):
        parts.append(f"<text x='{LEFT + CELL * column + 8}' y='{TOP - 12}' fill='{GREY}'>{bits} bits</text>")
    for number, item in enumerate(items):
        y = TOP + ROW * number
        kind, colour = ("sliding", SLIDING) if item.layer in sliding else ("full", FULL)
        parts.append(f"<rect x='24' y='{y}' width='98' height='{ROW - 3}' rx='3' fill='{colour}'/>")
        parts.append(f"<text x='30' y='{y + 12}'>{item.layer:>2} {kind}</text>")
        for column, bits in enumerate(candidates):
            share = (math.log10(max(item.loss[bits], 1e-12)) - low) / (high - low or 1)
            shade = "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(LOW, HIGH, strict=True))
            frame = f" stroke='{INK}' stroke-width='2'" if chosen[item.layer] == bits else ""
            x = LEFT + CELL * column
            parts.append(f"<rect x='{x}' y='{y}' width='{CELL - 6}' height='{ROW - 3}' rx='3' fill='{shade}'{frame}/>")
            ink = PAPER if share > 0.55 else INK
            parts.append(f"<text x='{x + 8}' y='{y + 12}' fill='{ink}'>{item.loss[bits]:.2e}</text>")
    return "\n".join([*parts, "</svg>"]) + "\n"
