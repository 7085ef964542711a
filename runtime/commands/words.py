"""Numbers and tables as people read them. Pure."""

from collections.abc import Sequence

from ...codegen.plan import ranges


def layers(indices: Sequence[int]) -> str:
    return f"layer{'s' if len(indices) > 1 else ''} {ranges(indices)}"


def table(rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Columns as wide as their widest cell, the last one as it comes."""
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        (indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]


def size(number: float) -> str:
    """Bytes, in the unit that leaves one to three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"
