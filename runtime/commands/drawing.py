"""The picture of `straightline show` as SVG, written by hand: no fonts, scripts or links. Pure."""

from xml.sax.saxutils import escape

from .picture import LayerRow

ROW, TOP, WIDTH = 19, 104, 920
FONT = "font-family='ui-monospace, SFMono-Regular, Menlo, Consolas, monospace' font-size='11.5'"
INK, GREY, PAPER = "#1f2430", "#6b7280", "#ffffff"
SLIDING, FULL, READER = "#9cc5e8", "#f0a35e", 0.42
BITS = {0: "#d8dce3", 2: "#e9d8fd", 3: "#d6bcfa", 4: "#b794f4", 6: "#9f7aea", 8: "#7c4fd0"}
TAP = "#d6336c"
X = {"tap": 46, "bar": 74, "heads": 262, "mlp": 372, "more": 440, "kv": 596, "rail": 700}


def drawing(name: str, headline: str, rows: tuple[LayerRow, ...], taps: frozenset[int], sentinel: int) -> str:
    """The whole file. Layers go down the page as tokens do."""
    height = TOP + (len(rows) + 2) * ROW + 22
    parts = [
        *paper(WIDTH, height, f"{name}: {headline}"),
        words_at(24, 32, name, "font-size='18' font-weight='bold'"),
        words_at(24, 52, headline, f"fill='{GREY}'"),
        *_headings(rows),
        *_end(-1, 0, "embedding", taps),
    ]
    for row in rows:
        parts += _layer(row)
    parts += _end(sentinel, len(rows) + 1, "final norm", taps)
    parts += _sharing(rows)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _headings(rows: tuple[LayerRow, ...]) -> list[str]:
    y, grey = TOP - 22, f"fill='{GREY}'"
    more = "experts" if rows[0].experts else "per-layer input" if rows[0].per_layer_input else ""
    return [
        words_at(X["tap"], y, "tap", f"{grey} text-anchor='end'"),
        words_at(X["bar"], y, "attention", grey),
        words_at(X["heads"], y, "Q:KV x dim", grey),
        words_at(X["mlp"], y, "MLP", grey),
        words_at(X["more"], y, more, grey),
        words_at(X["kv"], y, "keys and values", grey),
    ]


def _end(index: int, line: int, word: str, taps: frozenset[int]) -> list[str]:
    return [
        *_tap(index, line, index in taps),
        f"<rect x='{X['bar']}' y='{_y(line)}' width='164' height='{ROW - 4}' rx='3' fill='none' stroke='{GREY}'/>",
        words_at(X["bar"] + 8, _base(line), word, f"fill='{GREY}'"),
    ]


def _layer(row: LayerRow) -> list[str]:
    line = row.index + 1
    colour, width = (SLIDING, 92) if row.sliding else (FULL, 164)
    parts = [
        *_tap(row.index, line, row.tapped),
        f"<rect x='{X['bar']}' y='{_y(line)}' width='{width}' height='{ROW - 4}' rx='3' fill='{colour}' "
        f"fill-opacity='{1 if row.owns else READER}'/>",
        words_at(X["bar"] + 8, _base(line), "sliding" if row.sliding else "full"),
        words_at(X["heads"], _base(line), row.heads),
        words_at(X["mlp"], _base(line), str(row.mlp)),
    ]
    if row.experts:
        parts += _dots(X["more"], line)
        parts.append(words_at(X["more"] + 34, _base(line), row.experts))
    elif row.per_layer_input:
        parts.append(f"<circle cx='{X['more'] + 5}' cy='{_base(line) - 4}' r='3.5' fill='#3aa17e'/>")
        parts.append(words_at(X["more"] + 14, _base(line), f"+ {row.per_layer_input}"))
    if row.owns:
        parts.append(
            f"<rect x='{X['kv']}' y='{_y(line)}' width='74' height='{ROW - 4}' rx='3' fill='{BITS[row.kv_bits]}'/>"
        )
        word = f"{row.kv_bits}-bit" if row.kv_bits else "plain"
        ink = PAPER if row.kv_bits > 4 else INK
        parts.append(words_at(X["kv"] + 6, _base(line), f"{word}{' K=V' if row.k_eq_v else ''}", f"fill='{ink}'"))
    return parts


def _dots(x: int, line: int) -> list[str]:
    """Two rows of small squares: experts, the first two of them chosen."""
    return [
        f"<rect x='{x + 5 * at}' y='{_y(line) + 2 + 6 * down}' width='4' height='4' "
        f"fill='{FULL if not down and at < 2 else BITS[0]}'/>"
        for down in range(2)
        for at in range(5)
    ]


def _sharing(rows: tuple[LayerRow, ...]) -> list[str]:
    """A line from each layer that is read down to its readers."""
    parts = []
    for number, row in enumerate(one for one in rows if one.readers):
        x = X["rail"] + 26 * number
        colour = "#4a8cc7" if row.sliding else "#d97a29"
        top, bottom = _base(row.index + 1) - 4, _base(row.readers[-1] + 1) - 4
        parts.append(f"<path d='M{X['kv'] + 74} {top}H{x}V{bottom}' fill='none' stroke='{colour}' stroke-width='1.6'/>")
        for reader in row.readers:
            y = _base(reader + 1) - 4
            parts.append(f"<path d='M{X['kv'] + 6} {y}H{x}' stroke='{colour}' stroke-width='1.1' opacity='0.75'/>")
            parts.append(f"<path d='M{X['kv'] + 6} {y}l6 -3.5v7z' fill='{colour}'/>")
        label = f"K/V of {row.index}, read by {len(row.readers)}"
        where = _base(row.index + 1)
        parts.append(words_at(X["rail"] + 26 * number + 6, where, label, f"fill='{colour}'"))
    return parts


def _tap(index: int, line: int, tapped: bool) -> list[str]:
    style = f"fill='{TAP}' font-weight='bold'" if tapped else f"fill='{GREY}'"
    mark = [f"<path d='M{X['tap'] + 8} {_base(line) - 4}h14' stroke='{TAP}' stroke-width='2.5'/>"] if tapped else []
    return [words_at(X["tap"], _base(line), str(index), f"{style} text-anchor='end'"), *mark]


def paper(width: int, height: int, title: str) -> list[str]:
    """What every picture begins with; "</svg>" ends it."""
    return [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' viewBox='0 0 {width} {height}' "
        f"role='img' {FONT} fill='{INK}'>",
        f"<title>{escape(title)}</title>",
        f"<rect width='{width}' height='{height}' rx='8' fill='{PAPER}'/>",
    ]


def words_at(x: float, y: float, words: str, style: str = "") -> str:
    return f"<text x='{x:g}' y='{y}'{' ' + style if style else ''}>{escape(words)}</text>"


def _y(line: int) -> int:
    return TOP + line * ROW - 10


def _base(line: int) -> int:
    return _y(line) + 11
