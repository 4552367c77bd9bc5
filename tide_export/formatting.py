"""Plain-text tables for `validate`, `bench` and `inspect`: no dependency, the same in a pipe and on a screen."""

from collections.abc import Sequence


def table(headers: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1, indent: str = "  ") -> str:
    """A table with a rule under its headers; the first `left` columns are left-aligned, the others right-aligned."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(headers), *cells]) for i in range(len(headers))]

    def line(row: Sequence[str]) -> str:
        aligned = [str.ljust] * left + [str.rjust] * (len(row) - left)
        padded = [align(cell, width) for align, cell, width in zip(aligned, row, widths, strict=True)]
        return indent + "  ".join(padded).rstrip()

    return "\n".join([line(headers), indent + "  ".join("-" * width for width in widths), *map(line, cells)])


def size(count: int) -> str:
    """A number of bytes as people read it: `5.8 MB` (powers of ten, as file managers and disks count)."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def percent(part: float, whole: float) -> str:
    """`part / whole` as a percentage, `-` where there is nothing to divide by."""
    return f"{100.0 * part / whole:.1f} %" if whole else "-"
