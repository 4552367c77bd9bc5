"""Reports the result of a drafter's training as a table and JSON."""

from dataclasses import asdict, dataclass
from typing import Any

from tide_export.common.formatting import table
from tide_export.common.progress import duration
from tide_export.drafting.measure import Acceptance
from tide_export.routers.drafter_weights import CONFIDENCES


@dataclass(frozen=True)
class DraftReport:
    """The result of a drafter's training.

    Attributes:
        bundle: folder that holds the drafter now.
        settings: the settings given, with the model's hash.
        minutes: time spent by all runs together.
        answers: number of answers, including held-out ones.
        tokens: number of answer tokens trained on.
        trained_tokens: the same, counting repetitions.
        held_out: number of answers measured on.
        acceptance: share of drafts accepted in held-out answers.
        speed: expected speed over full depth, at the answers' temperature and greedy.
        measured_speed: speed of lossless mode over full depth at that temperature, on held-out prompts; None: not
            measured.
    """

    bundle: str
    settings: dict[str, Any]
    minutes: float
    answers: int
    tokens: int
    trained_tokens: int
    held_out: int
    acceptance: Acceptance
    speed: tuple[float, float]
    measured_speed: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def provenance(self) -> dict[str, Any]:
        """Returns the part of the report that the bundle's manifest keeps."""
        return {name: value for name, value in self.as_dict().items() if name not in ("bundle", "measured_speed")}

    def render(self) -> str:
        """Returns the report as two tables: a line per draft, and a line per interval of confidence."""
        temperature = f"T {self.settings['temperature']:g}"
        pairs = zip(self.acceptance.sampled, self.acceptance.greedy, strict=True)
        rows = [[f"draft {n}", f"{100 * a:.1f} %", f"{100 * b:.1f} %"] for n, (a, b) in enumerate(pairs, 1)]
        rows.append(["expected speed", *(f"{speed:.2f}x" for speed in self.speed)])
        if self.measured_speed is not None:
            rows.append(["measured speed", f"{self.measured_speed:.2f}x", ""])
        bounds = zip(CONFIDENCES, [*CONFIDENCES[1:], 1.0], self.acceptance.by_confidence, strict=True)
        confident = [[f"{low:g} to {high:g}", f"{100 * share:.1f} %"] for low, high, share in bounds]
        head = (
            f"{self.bundle}: a drafter of {self.tokens} tokens of {self.answers} answers, in "
            f"{duration(60 * self.minutes)}; accepted of drafts for {self.held_out} held-out answers:"
        )
        tables = table(["", temperature, "greedy"], rows), table(["confidence", f"draft 1, {temperature}"], confident)
        return "\n".join([head, *tables])
