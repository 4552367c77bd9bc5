"""Reports quality before and after training as a table, JSON and a plot."""

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tide_export.adaptation.quality import Quality
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
    """

    output: str
    settings: dict[str, Any]
    exits: tuple[int, ...]
    tokens: int
    before: Quality
    after: Quality

    @property
    def same_tokens(self) -> float:
        """The share of held-out tokens whose top-1 prediction at full depth is unchanged."""
        return self.after.same_as(self.before)

    def as_dict(self) -> dict[str, Any]:
        def quality(measured: Quality) -> dict[str, Any]:
            return {name: value for name, value in measured.as_dict().items() if name != "top1"}

        return {
            "output": self.output,
            "settings": self.settings,
            "exits": list(self.exits),
            "tokens": self.tokens,
            "before": quality(self.before),
            "after": quality(self.after),
            "full_depth_same_top1": self.same_tokens,
        }

    def render(self) -> str:
        """Returns the report as a table, one line per checkpoint."""
        before, after = self.before, self.after
        change = after.perplexity / before.perplexity - 1
        rows: list[list[str]] = [
            [f"agrees after {layers} layers"]
            + [f"{100 * quality.agreement[layers - 1]:.1f} %" for quality in (before, after)]
            for layers in self.exits
        ]
        rows.append(["perplexity", f"{before.perplexity:.3f}", f"{after.perplexity:.3f} ({100 * change:+.1f} %)"])
        rows.append(["full depth's token", "", f"{100 * self.same_tokens:.1f} % as before"])
        head = f"{self.output}: trained on {self.tokens} tokens, measured on {after.tokens} tokens of other documents"
        return f"{head}\n" + table([f"of {len(after.agreement)} layers", "before", "after"], rows)

    def write(self, folder: Path) -> None:
        """Writes the JSON and the plot into `folder`."""
        text = json.dumps(self.as_dict(), indent=2) + "\n"
        replace_files({folder / REPORT_FILE: text.encode(), folder / PICTURE_FILE: self._picture()})

    def _picture(self) -> bytes:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot()
        layers = range(1, len(self.after.agreement) + 1)
        for name, quality, style in (("before", self.before, "--"), ("after", self.after, "-")):
            label = f"{name} (perplexity {quality.perplexity:.2f})"
            axes.plot(layers, [100 * share for share in quality.agreement], style, marker="o", label=label)
        for exit_layers in self.exits:
            axes.axvline(exit_layers, color="#aab2bc", linewidth=0.8, zorder=0)
        axes.set(xlabel="layers run", ylabel="top-1 agreement with full depth, %", ylim=(0, 101))
        axes.legend()
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=120)
        return image.getvalue()
