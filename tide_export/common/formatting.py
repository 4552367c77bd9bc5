"""Formats tables, sizes and percentages as plain text, for reports and `inspect`."""

from collections.abc import Sequence
from typing import Any


def attributes(instance: object, *names: str) -> dict[str, Any]:
    """Returns attribute name -> value, for JSON."""
    return {name: getattr(instance, name) for name in names}


def table(headers: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1) -> str:
    """Returns a table with a line under its headers; columns after the first `left` are right-aligned."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(headers), *cells]) for i in range(len(headers))]

    def line(row: Sequence[str]) -> str:
        aligned = [str.ljust] * left + [str.rjust] * (len(row) - left)
        padded = [align(cell, width) for align, cell, width in zip(aligned, row, widths, strict=True)]
        return "  " + "  ".join(padded).rstrip()

    return "\n".join([line(headers), "  " + "  ".join("-" * width for width in widths), *map(line, cells)])


def size(count: int) -> str:
    """Returns a number of bytes as `5.8 MB` (powers of ten)."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def in_loops(layers: float, num_layers: int, loops: int) -> str:
    """Returns `, 2.1 of 4 loops` for layers run of a model whose layers run in loops; nothing for others."""
    return f", {layers * loops / num_layers:.1f} of {loops} loops" if loops > 1 else ""


def percent(part: float, whole: float) -> str:
    """Returns `part / whole` as a percentage, `-` for a `whole` of 0."""
    return f"{100.0 * part / whole:.1f} %" if whole else "-"
