"""Says in a sentence and a picture what the demo bundle gains, from the rows that `tools/benchmarks/modes.py` measured.

python demo/gained.py BUNDLE FOLDER
"""

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

from tide_export.bundle.auto_mode import sentence
from tide_export.bundle.opened import open_bundle

PAYS = 1.02  # as for mode auto


def said(bundle: Path, rows: list[dict], picture: Path) -> str:
    """Returns the sentences for `bundle`, whose numbers are those of the picture."""
    rows_of = {(row["mode"], row["setting"]): row for row in rows}
    exits = rows_of["exit", "the bundle's"]
    lossless = next(row for row in rows if row["mode"] == "lossless")
    auto = open_bundle(bundle).manifest.auto
    mode = "full" if auto is None else auto.mode
    by_auto = {"full": None, "exit": rows_of.get(("exit", "auto")), "lossless": lossless}[mode]
    best = max(1.0, lossless["speedup"], 1.0 if by_auto is None else by_auto["speedup"])
    small = "" if best >= PAYS else "This model is too small to gain without more changed tokens. "
    return (
        f"GAINED: {small}{best:.2f}x full depth's speed within the bounds of mode auto; {exits['speedup']:.2f}x with "
        f"{100 * exits['changed']:.1f} % changed tokens, at the bundle's thresholds ({exits['layers']:.1f} of "
        f"{rows_of['full', '']['layers']:.0f} layers per token); lossless mode, which changes none: "
        f"{lossless['speedup']:.2f}x.\n"
        f"Without --mode, {sentence(auto)}.\n"
        f"Picture: {picture}. Why: {bundle / 'report.html'}. What larger models gain: docs/measurements/modes.md"
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
    axes.set(xlabel="changed tokens, %", ylabel="speed over full depth")
    axes.set_title("What demo-llama gains: up is faster, left is closer to the full model", loc="left")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    bundle, folder = Path(sys.argv[1]), Path(sys.argv[2])
    rows = json.loads((folder / "modes.json").read_text())
    draw(rows, folder / "gained.png")
    print(said(bundle, rows, folder / "gained.png"))
