"""Holds and prints what `probe` predicts."""

from dataclasses import asdict, dataclass
from typing import Any

from tide_export.common.formatting import size, table
from tide_export.common.progress import duration
from tide_export.probing.forecast import ACCEPTED, Forecast, Prediction, pays

NAMES = {"fp32": "float32", "bf16": "bfloat16", "int4": "int4"}


@dataclass(frozen=True)
class Minutes:
    """Predicted minutes of commands with their defaults.

    Attributes:
        calibrate: including the model's load.
        draft: the fewest and most in which a drafter reaches the prior acceptance.
        export: without calibration, by the slowest type of weights.
        check: of an export with exits, to measure what they gain.
    """

    calibrate: float
    draft: tuple[float, float]
    export: float
    check: float


@dataclass(frozen=True)
class ProbeReport:
    """The predictions for a model.

    Attributes:
        model: folder, hub id or GGUF file.
        layers, parameters: of the whole model.
        answers, tokens: the model's own answers, and their tokens.
        chat: the prompts were a user's messages; else beginnings of texts.
        temperature: of the answers, and of changed tokens.
        epsilon: the share of tokens that mode exit may change.
        timed_layers: first layers of the bundles whose steps were timed.
        checkpoints: layers run at each checkpoint that was looked at.
        greedy_changed, changed: changed tokens if every token exits at one checkpoint, greedy and at `temperature`.
        modes: the speeds, by type of weights.
        minutes: of the commands that follow.
        seconds: that this took.
    """

    model: str
    layers: int
    parameters: int
    answers: int
    tokens: int
    chat: bool
    temperature: float
    epsilon: float
    timed_layers: int
    checkpoints: tuple[int, ...]
    greedy_changed: tuple[float, ...]
    changed: tuple[float, ...]
    modes: tuple[Forecast, ...]
    minutes: Minutes
    seconds: float

    @property
    def exits_pay(self) -> bool:
        """Whether mode exit is expected to be faster than full depth with some type of weights."""
        return any(mode.exit is not None and pays(mode.exit.speed) for mode in self.modes)

    def as_dict(self) -> dict[str, Any]:
        return {"prediction": True, "exits_pay": self.exits_pay, "verdict": self.verdict(), **asdict(self)}

    def verdict(self) -> str:
        """Returns a sentence or two: what pays for this model, in time."""
        exits = {m.weights: m.exit.speed for m in self.modes if m.exit is not None}
        share = f"{100 * self.epsilon:g} % changed tokens"
        if self.exits_pay:
            best = max(exits, key=lambda name: exits[name].expected)
            first = f"Exits may pay for this model: about {_times(exits[best])} in {NAMES[best]} at {share}."
        else:
            first = f"Exits will not pay for this model at {share}."
        drafters = {m.weights: m.drafter for m in self.modes if pays(m.drafter)}
        if not drafters:
            return f"{first} A drafter will not either."
        least, most = (f"{choose(d.expected for d in drafters.values()):.1f}x" for choose in (min, max))
        about = least if least == most else f"{least} to {most}"
        return f"{first} A drafter may, with the same text as full depth: about {about}."

    def render(self) -> str:
        """Returns the text that the command prints."""
        kind = "chat prompts" if self.chat else "beginnings of texts (the model has no chat template)"
        rows = [
            [
                NAMES[mode.weights],
                _rate(mode.tokens_per_second),
                "-" if mode.exit is None else _times(mode.exit.speed),
                "-" if mode.lossless is None else _times(mode.lossless),
                _times(mode.drafter),
                size(mode.memory),
                size(mode.disk),
            ]
            for mode in self.modes
        ]
        headers = ["weights", "full, tokens/s", "exit", "lossless, exits", "lossless, drafter", "RAM", "disk"]
        lines = [
            f"{self.model}: {self.layers} layers, {self.parameters:,} parameters; predicted on this machine",
            self.verdict(),
            "",
            table(headers, rows),
            "",
            *self._exits(),
            f"time      {self._time()}",
            f"basis     {self.tokens:,} tokens of its own answers to {self.answers} {kind},",
            f"          at temperature {self.temperature:g}; steps of {self._layers()}, timed here",
            f"exit      at most {100 * self.epsilon:g} % changed tokens; range: over parts of the answers, thresholds "
            "from the others",
            "lossless  the text of full depth; with exits: and n-grams, replayed on the answers",
            f"drafter   range: a prior, as none is trained: {_shares()} of first drafts accepted, which drafters of",
            "          two other models reached, with the step times of this one",
        ]
        return "\n".join(lines)

    def _time(self) -> str:
        calibrate, export = 60 * self.minutes.calibrate, 60 * self.minutes.export
        least, most = (duration(60 * minutes) for minutes in self.minutes.draft)
        with_exits = duration(calibrate + export + 60 * self.minutes.check)
        return (
            f"calibrate {duration(calibrate)}; draft {least} to {most}; export {duration(export)} without exits, "
            f"{with_exits} with"
        )

    def _layers(self) -> str:
        every = self.timed_layers == self.layers
        return f"all {self.layers} layers" if every else f"the first {self.timed_layers} layers"

    def _exits(self) -> list[str]:
        if not self.checkpoints:
            return ["exits      a model of one layer has no checkpoint"]
        rows = [
            [name, *(f"{100 * share:.0f} %" for share in shares)]
            for name, shares in (
                ("greedy", self.greedy_changed),
                (f"temperature {self.temperature:g}", self.changed),
            )
        ]
        return [
            table(["changed tokens if all exit after", *map(str, self.checkpoints)], rows),
            "",
        ]


def _times(prediction: Prediction) -> str:
    return f"{prediction.expected:.2f}x ({prediction.low:.2f}-{prediction.high:.2f})"


def _rate(prediction: Prediction) -> str:
    form = ",.0f" if prediction.expected >= 100 else ".1f"
    return f"{prediction.expected:{form}} ({prediction.low:{form}}-{prediction.high:{form}})"


def _shares() -> str:
    return f"{100 * ACCEPTED[0]:.0f} to {100 * ACCEPTED[-1]:.0f} %"
