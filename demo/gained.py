"""Says in a sentence and a picture what the demo bundle gains, from the rows that `tools/benchmarks/modes.py` measured.

    python demo/gained.py BUNDLE FOLDER
"""

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

from tide_export.bundle.auto_mode import sentence
from tide_export.bundle.opened import open_bundle


def said(bundle: Path, rows: list[dict], picture: Path) -> str:
    """Returns the sentences for `bundle`."""
    row = {(row["mode"], row["setting"]): row for row in rows}
    full, exits, lossless = row["full", ""], row["exit", "the bundle's"], row["lossless", ""]
    return (
        f"GAINED: {bundle} decodes {exits['speedup']:.2f}x as fast with exits as at full depth, {exits['layers']:.1f} "
        f"of {full['layers']:.0f} layers per token, and {100 * exits['changed']:.1f} % changed tokens; "
        f"lossless mode changes none, at {lossless['speedup']:.2f}x.\n"
        f"Without --mode, {sentence(open_bundle(bundle).manifest.auto)}.\n"
        f"Picture: {picture} (speed against changed tokens). What the model gains and why: {bundle / 'report.html'}"
    )


def draw(rows: list[dict], file: Path) -> None:
    """Draws speed against changed tokens, a line per mode."""
    figure = Figure(figsize=(7.5, 5), layout="constrained")
    axes = figure.add_subplot()
    labels = {
        "static": "all tokens exit at one checkpoint",
        "exit": "exit: routers decide, by threshold",
        "lossless": "lossless: exits are drafts",
        "full": "full depth",
    }
    for mode, label in labels.items():
        points = sorted((row["changed"], row["speedup"], row["setting"]) for row in rows if row["mode"] == mode)
        axes.plot([100 * point[0] for point in points], [point[1] for point in points], "o-", label=label)
        for changed, speedup, setting in points:
            axes.annotate(setting, (100 * changed, speedup), (4, 4), textcoords="offset points", fontsize=8)
    axes.set(xlabel="changed tokens, %", ylabel="decoding speed, full depth is 1")
    axes.set_title("What demo-llama gains: up is faster, left is closer to the full model", loc="left")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    bundle, folder = Path(sys.argv[1]), Path(sys.argv[2])
    rows = json.loads((folder / "modes.json").read_text())
    draw(rows, folder / "gained.png")
    print(said(bundle, rows, folder / "gained.png"))
