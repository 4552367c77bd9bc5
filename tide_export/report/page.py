"""Writes the report as one HTML page with all pictures in it: the verdict, then its evidence.

The page has no script and no external resource; its content security policy forbids both, so that no text of a model or
data set can add one.
"""

import base64
from importlib.resources import files

from tide_export.calibration.assessment import Assessment
from tide_export.calibration.calibration_error import BINS
from tide_export.common.version import __version__
from tide_export.report import plots
from tide_export.report.drafts import BEGIN, END
from tide_export.report.examples import colours_css, legend, passage
from tide_export.report.findings import Findings
from tide_export.report.html_tables import choices_table, lens_reports, quality_table, record_tables, routers_table
from tide_export.report.sentence import HEADLINE, Verdict, default_sentence, speed, within
from tide_export.report.theme import DARK, LIGHT
from tide_export.report.wording import change, counted, escaped, flops, number, percent

ROUGH = 2000  # tokens measured; with fewer, a tenth of a percent is a token or two
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def render(assessment: Assessment, findings: Findings, verdict: Verdict) -> str:
    """Returns the page's HTML."""
    checkpoints = len(assessment.evaluation.checkpoints)
    style = files("tide_export.report").joinpath("style.css").read_text(encoding="utf-8") + colours_css(checkpoints)
    title = f"Early exits of {assessment.model}"
    sections: list[str] = [
        _top(assessment, findings, verdict, title),
        _equal_quality(assessment, findings),
        _default(assessment, findings),
        _costs(assessment, findings),
        _convergence(assessment),
        _lenses(assessment),
        _routers(findings),
        _examples(assessment),
        BEGIN + END,
        _made(assessment),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escaped(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        + "\n".join(sections)
        + "\n</body>\n</html>\n"
    )


def _top(assessment: Assessment, findings: Findings, verdict: Verdict, title: str) -> str:
    depth = assessment.evaluation.num_layers
    choice = findings.choice(HEADLINE)
    tiles = [
        (speed(findings, choice), "expected speed over full depth"),
        (percent(choice.outcome.change.changed), "changed tokens, measured"),
        (change(choice.outcome.change.perplexity), "change of perplexity"),
        (f"{number(choice.outcome.layers)} of {depth}", "layers per token"),
    ]
    shown = "".join(f"<li><b>{escaped(value)}</b><span>{escaped(what)}</span></li>" for value, what in tiles)
    advice = f'<p class="warn">{escaped(verdict.advice)}</p>' if verdict.advice else ""
    return (
        f'<header><h1>{escaped(title)}</h1><p class="lead">{escaped(verdict.time)}</p>'
        f'<ul class="tiles">{shown}</ul><p>{escaped(verdict.found)}</p>{advice}</header>'
        f'<p class="note">At the choice for {within(HEADLINE)}. Layers and compute are '
        "averages over single next-token predictions; the time they save is measured by "
        "<code>tide-export bench</code>, since tokens that go deep take the waiting ones along.</p>"
    )


def _equal_quality(assessment: Assessment, findings: Findings) -> str:
    total = findings.chosen_on + findings.measured_on
    if findings.unit == "documents":
        how = (
            f"Thresholds were chosen on one half of the held-out documents ({counted(findings.chosen_on, 'token')}), "
            "and every other number in the table was measured on the other half "
            f"({counted(findings.measured_on, 'token')}; {counted(findings.documents, 'document')} and "
            f"{counted(total, 'token')} in all). What is changed can therefore be a little more, or less, than what "
            "was asked for; measured where they were chosen, thresholds look better than they are."
        )
    else:
        those = "only one document" if findings.documents == 1 else "one document that is nearly all of it"
        how = (
            f"The held-out text has {those}, so its tokens were halved instead: thresholds were chosen on the "
            f"first half ({counted(findings.chosen_on, 'token')}), and every other number in the table was measured "
            f"on the second ({counted(findings.measured_on, 'token')}). New documents may do worse than this."
        )
    few = f"Measured on {counted(findings.measured_on, 'token')} only: too few to tell tenths of a percent."
    rough = f'<p class="warn">{few}</p>' if findings.measured_on < ROUGH else ""
    perfect = findings.perfect
    return (
        "<section><h2>At equal quality</h2>"
        f"<p>{escaped(how)}</p>{rough}{quality_table(assessment, findings)}"
        "<p>Where their tokens leave, and what that costs:</p>"
        f"{choices_table(assessment, findings)}"
        f'<p class="note">Changed tokens are the share of positions at which another token than full depth\'s is drawn '
        f"with the same noise at temperature {perfect.change.temperature:g} (0: another token is likeliest); the "
        "change of perplexity is that of full depth's own tokens. Errors are standard errors over documents. A perfect "
        "router lets every token leave at the first checkpoint whose likeliest token is the full model's: it would run "
        f"{number(perfect.layers, 2)} layers per token. Router efficiency is the layers saved "
        "over those a perfect router saves; it can exceed 100 % where tokens may change. Compute counts two "
        "floating-point operations for a multiplication with an addition; attention over the cache is not counted, the "
        "routers and lenses passed are. Min_layers is not applied here: all checkpoints may be used.</p></section>"
    )


def _default(assessment: Assessment, findings: Findings) -> str:
    outcome = findings.default
    cost = assessment.costs.per_token(outcome, assessment.evaluation.checkpoints)
    of_full = f"{percent(cost / findings.full_flops)} of the full model's"
    panels = _panels([(plots.exits_panel(assessment, findings), "Exits by checkpoint with the default thresholds")])
    return (
        "<section><h2>What the bundle does by default</h2>"
        f"<p>{escaped(default_sentence(assessment, findings))}</p>"
        f'<p class="note">Measured on all {counted(findings.chosen_on + findings.measured_on, "held-out token")}. '
        f"Compute {flops(cost)} per token, {of_full}; mean KL divergence {number(outcome.kl, 4)} nats.</p>"
        f"{panels}</section>"
    )


def _costs(assessment: Assessment, findings: Findings) -> str:
    panels = [
        (plots.quality_panel(assessment, findings, "changed", "layers", close=True), "Changed tokens against layers"),
        (plots.quality_panel(assessment, findings, "changed", "flops"), "Changed tokens against compute"),
        (plots.quality_panel(assessment, findings, "perplexity", "layers"), "Change of perplexity against layers"),
        (plots.quality_panel(assessment, findings, "kl", "layers"), "KL divergence against layers"),
    ]
    return (
        "<section><h2>Quality against cost</h2>"
        "<p>Best thresholds: one per checkpoint, chosen on one half and measured on the other, from careful to "
        "bold. One threshold for all: the knob <code>--threshold</code>. The grey squares let every token "
        "leave at one and the same checkpoint: what a router has to beat. The vertical line is the full model.</p>"
        f"{_panels(panels)}</section>"
    )


def _convergence(assessment: Assessment) -> str:
    panels = [
        (plots.convergence_panel(assessment, "changed"), "Changed tokens by layer"),
        (plots.convergence_panel(assessment, "cosine"), "Cosine similarity of each layer with the last"),
        (plots.convergence_panel(assessment, "kl"), "KL divergence of each layer from the full model"),
    ]
    return (
        "<section><h2>How early the answer is there</h2>"
        "<p>The final norm and head on every layer's own state, without any lens, on "
        f"{counted(assessment.convergence.tokens, 'token')}: where changed tokens fall is where checkpoints pay.</p>"
        f"{_panels(panels)}</section>"
    )


def _lenses(assessment: Assessment) -> str:
    reports = lens_reports(assessment)
    if not any(report["used"] for report in reports.values()):
        none = "No lens gained enough to be used: states exit unchanged at every checkpoint."
        return f"<section><h2>Lenses</h2><p>{none}</p></section>" if reports else ""
    panels = [
        (plots.learning_panel(reports, "may_exit"), "Tokens that may exit, over the tokens lenses were fitted to"),
        (plots.learning_panel(reports, "kl"), "KL divergence, over the tokens lenses were fitted to"),
    ]
    return (
        "<section><h2>What the lenses learned</h2>"
        "<p>Measured on validation text while the lenses were fitted; at 0 tokens, without a lens. Dashed: states exit "
        "unchanged there, because a lens gains too little. A curve that still moves at its end wants more text "
        "(lens_tokens).</p>"
        f"{_panels(panels)}</section>"
    )


def _routers(findings: Findings) -> str:
    panels = [(plots.precision_recall_panel(findings), "Precision against recall of each router")]
    panels += [
        (plots.reliability_panel(findings.routers, k), f"Reliability of the score after {router.checkpoint} layers")
        for k, router in enumerate(findings.routers)
    ]
    warnings = "".join(f'<p class="note">Warning: {escaped(sentence)}.</p>' for sentence in findings.warnings)
    return (
        "<section><h2>Whether the routers can tell</h2>"
        "<p>Each router on all held-out tokens, also those that would have left before it, against the label it was "
        "taught. On the diagonal of a reliability diagram a score is a probability: of the tokens with a score near "
        "90 % nine in ten may leave. The expected calibration error (ECE) is the mean distance from it, in at most "
        f"{BINS} bins of equally many tokens.</p>{warnings}{routers_table(findings)}{_panels(panels)}</section>"
    )


def _examples(assessment: Assessment) -> str:
    evaluation = assessment.evaluation
    shown = [passage(e, evaluation.checkpoints, evaluation.num_layers) for e in assessment.examples if e.pieces]
    if not shown:
        return "<section><h2>Examples</h2><p>No passage was kept for reading.</p></section>"
    return (
        "<section><h2>Examples</h2>"
        "<p>Held-out text. A token's colour says how many layers were run to predict the one after it, with the "
        "default thresholds; point at it to see what was predicted.</p>"
        f"{legend(evaluation.checkpoints, evaluation.num_layers)}{''.join(shown)}</section>"
    )


def _made(assessment: Assessment) -> str:
    record = {"model": assessment.model, **assessment.provenance}
    return (
        f"<section><h2>How this was made</h2>{record_tables(record)}"
        f'<p class="note">Written by tide_export {escaped(__version__)}. Nothing here was measured by running the '
        "exported bundle; <code>tide-export validate</code> does that.</p></section>"
    )


def _panels(panels: list[tuple[plots.Panel, str]]) -> str:
    return f'<div class="panels">{"".join(_picture(panel, name) for panel, name in panels)}</div>'


def _picture(panel: plots.Panel, name: str) -> str:
    light, dark = (base64.b64encode(picture).decode("ascii") for picture in plots.pngs(panel, LIGHT, DARK))
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="data:image/png;base64,{dark}">'
        f'<img alt="{escaped(name)}" src="data:image/png;base64,{light}"></picture>'
    )
