"""Draws the pictures of the result pages from the pages' own tables, so that both say the same.

    python tools/benchmarks/page_pictures.py [--out FOLDER]

Run it after a table of docs/measurements has changed, and look at the pictures. The picture of drafts beside other
runtimes is drawn by drafts_beside_peers.py.
"""

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tide_export.report.theme import LIGHT

PAGES = Path(__file__).parents[2] / "docs" / "measurements"
Table = list[list[str]]  # the first row is the header


def tables(page: str, heading: str) -> list[Table]:
    """Returns the tables between a heading and the next one, without marks of bold text and code."""
    section = re.split(rf"^##+ {re.escape(heading)}$", (PAGES / page).read_text(), flags=re.MULTILINE)[1]
    section = re.split(r"^##", re.sub(r"[*`]", "", section), maxsplit=1, flags=re.MULTILINE)[0]
    found = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    rows = [[[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()] for table in found]
    return [[header, *body] for header, _, *body in rows]


def number(cell: str) -> float:
    """Returns the first number of a cell."""
    return float(re.findall(r"[\d,]*\.?\d+", cell)[0].replace(",", ""))


def bars(axes: Axes, groups: Sequence[str], series: dict[str, list[float]], title: str) -> None:
    """Draws a bar for each group and series, with its number above it."""
    width = 0.85 / len(series)
    for i, (label, values) in enumerate(series.items()):
        places = [group - 0.425 + (i + 0.5) * width for group in range(len(groups))]
        colour = colormaps["viridis"](0.05 + 0.75 * i / max(1, len(series) - 1))
        drawn = axes.bar(places, values, width * 0.94, color=colour, label=label)
        axes.bar_label(drawn, [f"{value:.2f}" if value < 10 else f"{value:,.0f}" for value in values], fontsize=7)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_title(title, loc="left", color=LIGHT.ink, fontsize=10)
    axes.grid(axis="y", color=LIGHT.faint)
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    axes.set_ylim(0, 1.3 * max(max(values) for values in series.values()))


def drafts_by_source(figure: Figure) -> None:
    header, *rows = tables("modes-and-drafts.md", "Drafts on Qwen2.5-Coder-0.5B")[0]
    for axes, kind in zip(figure.subplots(1, 2), ("T .8", "greedy"), strict=True):
        chosen = {row[0].split(",")[0]: [number(cell) for cell in row[1:]] for row in rows if row[0].endswith(kind)}
        bars(axes, [name.replace(" about a text", "").replace(" from a text", "") for name in header[1:]], chosen, kind)
        axes.axhline(1, color=LIGHT.ink, linewidth=0.8)
        axes.set_ylabel("speed over full depth" if kind == "T .8" else "")


def exits(figure: Figure) -> None:
    axes, model = figure.subplots(), ""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in tables("modes-and-drafts.md", "Exits")[0][1:]:
        model = row[0] or model
        points.setdefault(model, []).append((number(row[2]), number(row[4])))
        if row[1] == "auto":
            axes.plot(*points[model][-1], "o", markersize=15, color=LIGHT.best, markerfacecolor="none")
    for i, (model, found) in enumerate(points.items()):
        axes.plot(*zip(*found, strict=True), "osD"[i] + "-", color=colormaps["viridis"](0.05 + 0.35 * i), label=model)
    axes.plot([], [], "o", markersize=12, color=LIGHT.best, markerfacecolor="none", label="mode auto")
    axes.axhline(1, color=LIGHT.ink, linewidth=0.8)
    axes.set(xlabel="changed tokens (greedy), %", ylabel="speed over full depth", xlim=(0, None))
    axes.grid(color=LIGHT.faint)
    axes.legend(fontsize=8, frameon=False, loc="upper left")


def streams(figure: Figure) -> None:
    _, *served = tables("serving.md", "Beside llama.cpp's server")[0]
    _, *batches = tables("serving.md", "Batches, equal to the bit")[0]
    sides = figure.subplots(1, 3)
    for axes, weights in zip(sides, ("int4", "float32"), strict=False):
        rows = [row for row in served if row[0] == weights]
        series = {"tide-export": [number(row[2]) for row in rows], "llama.cpp": [number(row[3]) for row in rows]}
        bars(axes, [row[1] for row in rows], series, f"server, {weights}, by streams")
    series = {"tide-export": [number(row[1]) for row in batches], "MatMulNBits": [number(row[2]) for row in batches]}
    bars(sides[2], [row[0] for row in batches], series, "library, int4, by sequences")
    sides[0].set_ylabel("tokens/s, SmolLM2-135M")


def bits(figure: Figure) -> None:
    axes = figure.subplots()
    _, *rows = tables("quality-per-bit.md", "Beside llama.cpp's formats")[0]
    kinds: dict[str, list[list[str]]] = {"tide-export": [], "tide-export, gptq": [], "llama.cpp": []}
    for row in rows:
        kinds["llama.cpp" if "--" not in row[0] else "tide-export" + ", gptq" * ("gptq" in row[0])].append(row)
    for i, (title, table) in enumerate(kinds.items()):
        names = [re.sub("--weights |--quantization gptq", "", row[0]).strip() for row in table]
        found = [(number(row[1]), number(row[2]), name) for row, name in zip(table, names, strict=True)]
        colour = colormaps["viridis"](0.05 + 0.35 * i)
        axes.plot([x for x, _, _ in found], [y for _, y, _ in found], "osD"[i], color=colour, label=title, zorder=4 - i)
        for x, y, name in found:
            right = i == 1 or name[-1] in "MK1"  # of its neighbours' marks
            place: dict[str, Any] = {"xytext": (6 if right else -7, -3), "ha": "left" if right else "right"}
            axes.annotate(name, (x, y), textcoords="offset points", fontsize=8, color=colour, **place)
    axes.set(xlabel="bits a weight", ylabel="divergence from float32, thousandths of a nat", yscale="log")
    axes.set(xlim=(4, 9), ylim=(0.01, 10))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(color=LIGHT.faint)
    axes.legend(fontsize=8, frameon=False)


PICTURES: dict[str, tuple[Callable[[Figure], None], tuple[float, float]]] = {
    "drafts-by-source.png": (drafts_by_source, (10, 3.6)),
    "exits.png": (exits, (7, 4)),
    "streams.png": (streams, (10, 3.4)),
    "bits.png": (bits, (7, 4)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PAGES / "pictures", metavar="FOLDER", help="(the pages' own)")
    folder = parser.parse_args().out
    for name, (draw, size) in PICTURES.items():
        figure = Figure(figsize=size, dpi=130, layout="constrained")
        draw(figure)
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_axisbelow(True)
        FigureCanvasAgg(figure).print_png(folder / name)


if __name__ == "__main__":
    main()
