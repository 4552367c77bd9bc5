"""Says in a sentence and a picture what a demo bundle gains, from the rows that `tools/benchmarks/modes.py` measured.

python demo/gained.py BUNDLE FOLDER
"""

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

from tide_export.bundle.auto_mode import sentence
from tide_export.bundle.opened import open_bundle

PAYS = 1.02  # as for mode auto


def row_of_auto(bundle: Path, rows: list[dict]) -> dict:
    """Returns the row of the mode that `auto` is."""
    auto = open_bundle(bundle).manifest.auto
    mode = "full" if auto is None else auto.mode
    return next(row for row in rows if row["mode"] == mode and (mode != "exit" or row["setting"] == "auto"))


def said(bundle: Path, rows: list[dict], picture: Path) -> str:
    """Returns the sentences for `bundle`, whose numbers are those of the picture."""
    rows_of = {(row["mode"], row["setting"]): row for row in rows}
    exits, lossless = rows_of["exit", "the bundle's"], next(row for row in rows if row["mode"] == "lossless")
    best = max(1.0, lossless["speedup"], row_of_auto(bundle, rows)["speedup"])
    small = "" if best >= PAYS else "This model is too small to gain without more changed tokens. "
    return (
        f"GAINED: {small}{best:.2f}x full depth's speed within the bounds of mode auto; {exits['speedup']:.2f}x with "
        f"{100 * exits['changed']:.1f} % changed tokens, at the bundle's thresholds ({exits['layers']:.1f} of "
        f"{rows_of['full', '']['layers']:.0f} layers per token); lossless mode, which changes none: "
        f"{lossless['speedup']:.2f}x.\n"
        f"Without --mode, {sentence(open_bundle(bundle).manifest.auto)}.\n"
        f"Picture: {picture}. Why: {bundle / 'report.html'}. "
        "What ordinary and larger models gain: docs/measurements/modes-and-drafts.md"
    )


def draw(rows: list[dict], file: Path, auto: tuple[float, float]) -> None:
    """Draws speed against changed tokens, a line per mode, and a star at `auto`: its changed tokens and speed."""
    figure = Figure(figsize=(7.5, 5), layout="constrained")
    axes = figure.add_subplot()
    labels = {
        "static": ("all tokens exit at one checkpoint", (8, -4), "left"),
        "exit": ("exit: routers decide, by threshold", (-8, 2), "right"),
        "lossless": ("lossless: exits are drafts", (0, 0), "left"),
        "full": ("full depth", (0, 0), "left"),
    }
    for mode, (label, offset, side) in labels.items():
        points = sorted((row["changed"], row["speedup"], row["setting"]) for row in rows if row["mode"] == mode)
        axes.plot([100 * point[0] for point in points], [point[1] for point in points], "o-", label=label)
        for changed, speedup, setting in points:
            if setting != "auto":
                axes.annotate(
                    setting, (100 * changed, speedup), offset, textcoords="offset points", fontsize=8, ha=side, zorder=4
                )
    axes.plot(100 * auto[0], auto[1], "k*", markersize=14, label="auto: what runs without --mode")
    axes.set(xlabel="changed tokens, %", ylabel="speed over full depth")
    axes.margins(x=0.12)
    axes.set_title("What demo-looped gains: up is faster, left is closer to the full model", loc="left")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    bundle, folder = Path(sys.argv[1]), Path(sys.argv[2])
    rows = json.loads((folder / "modes.json").read_text())
    auto = row_of_auto(bundle, rows)
    draw(rows, folder / "gained.png", (auto["changed"], auto["speedup"]))
    print(said(bundle, rows, folder / "gained.png"))
