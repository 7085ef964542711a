"""The picture of `straightline show` in a terminal: plain characters, no colours. Pure."""

from .picture import LayerRow
from .words import table


def terminal(name: str, headline: str, rows: tuple[LayerRow, ...], taps: frozenset[int], sentinel: int) -> str:
    """One line a layer. The rail on the right joins a layer that is read to its readers."""
    extra = any(row.per_layer_input for row in rows)
    experts = any(row.experts for row in rows)
    heads = ["tap", "", "attention", "heads", "MLP"]
    heads += ["experts"] * experts + ["input"] * extra + ["K/V"]
    lines = [heads, [_mark(-1, taps), "", "embedding", *[""] * (len(heads) - 3)]]
    for row in rows:
        cells = [_mark(row.index, taps), "▪" if row.sliding else "█", "sliding" if row.sliding else "FULL", row.heads]
        cells += [str(row.mlp), *[row.experts] * experts, *[f"+{row.per_layer_input}"] * extra]
        lines.append([*cells, f"{_rails(row, rows)} {row.kv}".strip() if _shares(rows) else row.kv])
    lines.append([_mark(sentinel, taps), "", "final norm", *[""] * (len(heads) - 3)])
    return "\n".join([name, headline, "", *table(lines, indent="")]) + "\n"


def _mark(index: int, taps: frozenset[int]) -> str:
    return f"{index:>3}{' *' if index in taps else ''}"


def _shares(rows: tuple[LayerRow, ...]) -> bool:
    return any(row.readers for row in rows)


def _rails(row: LayerRow, rows: tuple[LayerRow, ...]) -> str:
    """One column for each layer that is read: ┐ where it starts, ┤ at a reader, │ on the way, ┘ at the last reader."""
    drawn = ""
    for source in (one for one in rows if one.readers):
        last = source.readers[-1]
        if row.index == source.index:
            drawn += "┐"
        elif row.index in source.readers:
            drawn += "┘" if row.index == last else "┤"
        else:
            drawn += "│" if source.index < row.index < last else "·"
    return drawn
