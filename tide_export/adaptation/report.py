"""Reports quality before and after training as a table, JSON and a plot."""

import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tide_export.adaptation.quality import Quality
from tide_export.common.changed_tokens import Change
from tide_export.common.files import replace_files
from tide_export.common.formatting import table

REPORT_FILE = "adapt.json"
PICTURE_FILE = "adapt.png"


@dataclass(frozen=True)
class AdaptReport:
    """The result of a training run.

    Attributes:
        output: folder of the trained model.
        settings: the settings given, with the hashes of model and text.
        exits: checkpoints that were trained.
        tokens: number of tokens trained on.
        before, after: quality on the same held-out text; `after` with the weights rounded as stored.
        change, greedy_change: what full depth changed of the original's text, sampled and greedy.
    """

    output: str
    settings: dict[str, Any]
    exits: tuple[int, ...]
    tokens: int
    before: Quality
    after: Quality
    change: Change
    greedy_change: Change

    def as_dict(self) -> dict[str, Any]:
        return {
            "output": self.output,
            "settings": self.settings,
            "exits": list(self.exits),
            "tokens": self.tokens,
            "before": asdict(self.before),
            "after": asdict(self.after),
            "full_depth_change": asdict(self.change),
            "full_depth_change_greedy": asdict(self.greedy_change),
        }

    def render(self) -> str:
        """Returns the report as a table, one line per checkpoint."""
        before, after = self.before, self.after
        to_before = after.perplexity / before.perplexity - 1
        rows: list[list[str]] = [
            [f"changed tokens if all exit after {layers} layers, greedy"]
            + [f"{100 * quality.changed[layers - 1]:.1f} %" for quality in (before, after)]
            for layers in self.exits
        ]
        rows.append(
            ["perplexity of the text", f"{before.perplexity:.3f}", f"{after.perplexity:.3f} ({100 * to_before:+.1f} %)"]
        )
        for made in (self.change, self.greedy_change):
            at = f"temperature {made.temperature:g}" if made.temperature else "greedy"
            share = f"{100 * made.changed:.1f} ± {100 * made.changed_error:.1f} %"
            rows.append([f"full depth against the original, {at}: changed tokens", "", share])
            share = f"{100 * made.perplexity:+.1f} ± {100 * made.perplexity_error:.1f} %"
            rows.append([f"full depth against the original, {at}: change of perplexity", "", share])
        head = f"{self.output}: trained on {self.tokens} tokens, measured on {after.tokens} tokens of other documents"
        return f"{head}\n" + table([f"of {len(after.changed)} layers", "before", "after"], rows)

    def write(self, folder: Path) -> None:
        """Writes the JSON and the plot into `folder`."""
        text = json.dumps(self.as_dict(), indent=2) + "\n"
        replace_files({folder / REPORT_FILE: text.encode(), folder / PICTURE_FILE: self._picture()})

    def _picture(self) -> bytes:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot()
        layers = range(1, len(self.after.changed) + 1)
        for name, quality, style in (("before", self.before, "--"), ("after", self.after, "-")):
            label = f"{name} (perplexity {quality.perplexity:.2f})"
            axes.plot(layers, [100 * share for share in quality.changed], style, marker="o", label=label)
        for exit_layers in self.exits:
            axes.axvline(exit_layers, color="#aab2bc", linewidth=0.8, zorder=0)
        axes.set(xlabel="layers run", ylabel="changed tokens if all exit here, greedy, %", ylim=(0, 101))
        axes.legend()
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=120)
        return image.getvalue()
