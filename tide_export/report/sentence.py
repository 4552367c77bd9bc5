"""Sums up in a sentence or two what a model gains from early exits, or why it gains nothing."""

from dataclasses import dataclass

from tide_export.calibration.assessment import Assessment, Outcome
from tide_export.common.formatting import in_loops
from tide_export.report.findings import Choice, Findings, RouterFinding
from tide_export.report.wording import change, listed, number, percent

HEADLINE = 0.02  # changed tokens and change of perplexity, as mode `auto` allows
WORTHWHILE = 0.05  # share of layers saved; routers and bookkeeping cost as much as less would save
MUCH = 0.10  # share of layers that a perfect router would save; with less, routers are not the cause
OFTEN = 0.5  # share of the tokens

REASONS = {
    "heads": "its early heads rarely give the full model's token",
    "late": "only its last checkpoints often give the full model's token, where few layers are left to save",
    "routers": "its routers cannot tell which tokens may leave",
}
ADVICE = {
    "heads": "What can help: more text for the lenses (lens_tokens); a model trained with an early-exit loss, "
    "as LayerSkip is; more changed tokens, if the use allows them.",
    "late": "What can help: more text for the lenses (lens_tokens), which make fewer changed tokens at earlier layers; "
    "checkpoints placed where the convergence curve below falls; a model trained with an early-exit loss.",
    "routers": "What can help: more calibration text, and text like the text the model will write; another label; a "
    "larger router_bottleneck_dim; fewer checkpoints; more changed tokens, if the use allows them.",
}


@dataclass(frozen=True)
class Verdict:
    """The summary on top of the report.

    Attributes:
        reason: why exits do not save `WORTHWHILE` layers within `HEADLINE`: `heads`, `late` or `routers`; None: they
            do.
        time: the speed to expect.
        found: one or two plain sentences on where that comes from.
        advice: advice if they do not; else empty.
    """

    reason: str | None
    time: str
    found: str
    advice: str

    @property
    def sentence(self) -> str:
        """All of it but the advice."""
        return f"{self.time} {self.found}"


def verdict(assessment: Assessment, findings: Findings) -> Verdict:
    """Sums up the findings at the choice within `HEADLINE`."""
    depth, loops = assessment.evaluation.num_layers, assessment.evaluation.loops
    choice = findings.choice(HEADLINE)
    saved = saved_share(choice, depth)
    possible = 1 - findings.perfect.layers / depth
    time = _time(findings, choice)
    if saved >= WORTHWHILE:
        layers = choice.outcome.layers
        found = (
            f"With at most {within(HEADLINE)}, {assessment.model} runs "
            f"{number(layers)} of {depth} layers per token{in_loops(layers, depth, loops)} "
            f"({percent(saved, 0)} fewer); a perfect router would run {number(findings.perfect.layers)} "
            f"(router efficiency {percent(choice.efficiency, 0)}). "
            f"Measured on text that the thresholds were not chosen on: {_changes(choice.outcome)}."
        )
        return Verdict(None, time, found, "")

    reason = _reason(findings, possible)
    share = percent(saved) if saved >= 0.0005 else "none"
    cost = f"saves {share} of its {depth} layers"
    found = (
        f"{assessment.model} does not gain from early exits as calibrated: with at most {within(HEADLINE)} "
        f"it {cost}, because {REASONS[reason]}. {_evidence(findings, reason, choice, possible)}"
        f"{_cheaper(findings, depth)}"
    )
    return Verdict(reason, time, found, ADVICE[reason])


def default_sentence(assessment: Assessment, findings: Findings) -> str:
    """Describes the bundle's result with its default thresholds."""
    depth, loops, outcome = assessment.evaluation.num_layers, assessment.evaluation.loops, findings.default
    open_at = [r for r in findings.routers if r.threshold < 1.0]
    if not open_at:
        return (
            "With its default thresholds the bundle lets no token leave early: every checkpoint is switched off "
            "(by min_layers or a threshold of 1), so it gives what the full model gives, and saves nothing."
        )
    off = [r for r in findings.routers if r.threshold >= 1.0]
    closed = f" ({_after(off)} switched off)" if off else ""
    if sum(outcome.exit_shares) == 0:
        return (
            f"With its default thresholds{closed} no held-out token left early: every one ran all {depth} layers. "
            "The table above says what other thresholds would give."
        )
    return (
        f"With its default thresholds{closed} the bundle runs {number(outcome.layers)} of {depth} layers per token"
        f"{in_loops(outcome.layers, depth, loops)} ({percent(1 - outcome.layers / depth)} fewer), with "
        f"{_changes(outcome)}; {percent(1 - sum(outcome.exit_shares))} of the tokens run all layers."
    )


def saved_share(choice: Choice, depth: int) -> float:
    """Returns the share of the layers that a choice does not run, 0 .. 1."""
    return 1 - choice.outcome.layers / depth


def speed(findings: Findings, choice: Choice) -> str:
    """Returns the speed over full depth to expect of a choice, by its operations (its bytes too)."""
    return f"{number(findings.full_flops / choice.flops, 2)}x"


def _time(findings: Findings, choice: Choice) -> str:
    return (
        f"Decoding should run at {speed(findings, choice)} the speed of full depth with "
        f"{percent(choice.outcome.change.changed)} changed tokens, counting layers, head, routers and lenses; "
        "export measures it."
    )


def _reason(findings: Findings, possible: float) -> str:
    if possible >= MUCH:
        return "routers"
    return "late" if min(r.changed for r in findings.routers) <= 1 - OFTEN else "heads"


def _evidence(findings: Findings, reason: str, choice: Choice, possible: float) -> str:
    if reason == "routers":
        return f"A perfect router would save {percent(possible, 0)} of the layers at these checkpoints{_found(choice)}."
    heads = listed([f"{percent(1 - r.changed, 0)} after {r.checkpoint}" for r in findings.routers[:4]])
    more = ", for the first four" if len(findings.routers) > 4 else ""
    return (
        f"Even a perfect router would save only {percent(possible)}; an exit gives the full model's token in {heads} "
        f"layers{more}."
    )


def _cheaper(findings: Findings, depth: int) -> str:
    """Names the smallest larger bound that saves `WORTHWHILE` layers, if one does."""
    for choice in findings.choices:
        if choice.epsilon > HEADLINE and saved_share(choice, depth) >= WORTHWHILE:
            return f" {percent(choice.epsilon, 0)} of both would save {percent(saved_share(choice, depth), 0)}."
    return ""


def _found(choice: Choice) -> str:
    return f", the fitted ones find {percent(choice.efficiency, 0)} of that" if choice.efficiency > 0 else ""


def _after(routers: list[RouterFinding]) -> str:
    layers = listed([str(r.checkpoint) for r in routers])
    return f"checkpoint{'s' if len(routers) > 1 else ''} {layers} {'are' if len(routers) > 1 else 'is'}"


def within(epsilon: float) -> str:
    """Returns the bound of a choice as words."""
    return f"{percent(epsilon, 0)} changed tokens and {percent(epsilon, 0)} more perplexity"


def _changes(outcome: Outcome) -> str:
    made = outcome.change
    return (
        f"{percent(made.changed)} changed tokens and a perplexity of {change(made.perplexity)} at temperature "
        f"{made.temperature:g}"
    )
