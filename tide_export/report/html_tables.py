"""Renders the report's tables as HTML: equal quality, the routers, and their calibration."""

from collections.abc import Mapping, Sequence
from typing import Any

from tide_export.calibration.assessment import Assessment
from tide_export.report.findings import Choice, Findings
from tide_export.report.sentence import HEADLINE, saved_share
from tide_export.report.wording import MISSING, change, escaped, flops, number, percent, threshold
from tide_export.thresholds.resolve import MAX_THRESHOLD


def quality_table(assessment: Assessment, findings: Findings) -> str:
    """Returns a table with one row per bound, and one for the model without exits."""
    depth, checkpoints = assessment.evaluation.num_layers, assessment.evaluation.checkpoints
    headers = [
        "at most, of both", "changed tokens", "change of perplexity", "layers per token", "layers saved",
        "router efficiency", "compute per token", "of full", "mean KL, nats",
        *[f"leave after {c}" for c in checkpoints], f"run all {depth}",
        f"thresholds at {', '.join(map(str, checkpoints))}",
    ]  # fmt: skip
    nothing_leaves = assessment.evaluation.outcome((MAX_THRESHOLD,) * len(checkpoints))
    full = Choice(0.0, nothing_leaves, findings.full_flops, float("nan"))
    rows = [["no exits", *_measured(full, findings.full_flops, depth), MISSING]]
    for choice in findings.choices:
        thresholds = ", ".join(map(threshold, choice.outcome.thresholds))
        rows.append([percent(choice.epsilon), *_measured(choice, findings.full_flops, depth), thresholds])
    headline = 1 + [choice.epsilon for choice in findings.choices].index(HEADLINE)
    return html_table(headers, rows, headline)


def routers_table(findings: Findings) -> str:
    """Returns a table with one row per checkpoint."""
    headers = [
        "checkpoint", "changed tokens if all leave here", "may leave (label)", "mean score", "calibration error (ECE)",
        "default threshold", "precision there", "recall there", "tokens that leave here",
    ]  # fmt: skip
    rows = [
        [
            f"after {r.checkpoint}", percent(r.changed), percent(r.positive_rate), percent(r.mean_score),
            percent(r.reliability.error), threshold(r.threshold), percent(r.precision), percent(r.recall),
            percent(share),
        ]
        for r, share in zip(findings.routers, findings.default.exit_shares, strict=True)
    ]  # fmt: skip
    return html_table(headers, rows)


def record_tables(provenance: Mapping[str, Any]) -> str:
    """Returns the record as tables: one of the plain values, and a folded one per nested value."""
    plain = {name: value for name, value in provenance.items() if not isinstance(value, Mapping)}
    nested = {name: value for name, value in provenance.items() if isinstance(value, Mapping)}
    parts = [_record(plain)] if plain else []
    for name, values in nested.items():
        opened = " open" if name == "versions" else ""
        flat = _record(dict(_flat(values)))
        parts.append(f"<details{opened}><summary>{escaped(_name(name))}</summary>{flat}</details>")
    return "".join(parts)


def lens_reports(assessment: Assessment) -> dict[int, Mapping[str, Any]]:
    """Returns checkpoint -> the report of its lens, if one was fitted."""
    reports = assessment.provenance.get("report", {})
    return {int(layers): report["lens"] for layers, report in reports.items() if "lens" in report}


def html_table(headers: Sequence[str], rows: Sequence[Sequence[str]], headline: int | None = None) -> str:
    """Returns a table that scrolls sideways on a narrow screen; row number `headline` stands out."""
    head = "".join(f'<th scope="col">{escaped(header)}</th>' for header in headers)
    body = []
    for i, row in enumerate(rows):
        cells = f'<th scope="row">{escaped(row[0])}</th>' + "".join(f"<td>{escaped(cell)}</td>" for cell in row[1:])
        body.append(f'<tr class="headline">{cells}</tr>' if i == headline else f"<tr>{cells}</tr>")
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{table}</div>'


def _measured(choice: Choice, full_flops: float, depth: int) -> list[str]:
    outcome = choice.outcome
    return [
        f"{percent(outcome.change.changed)} ± {percent(outcome.change.changed_error)}",
        f"{change(outcome.change.perplexity)} ± {percent(outcome.change.perplexity_error)}",
        number(outcome.layers, 2),
        percent(saved_share(choice, depth)),
        percent(choice.efficiency, 0),
        flops(choice.flops),
        percent(choice.flops / full_flops),
        number(outcome.kl, 4),
        *map(percent, outcome.exit_shares),
        percent(1 - sum(outcome.exit_shares)),
    ]


def _record(values: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escaped(_name(name))}</th><td>{escaped(_value(value))}</td></tr>'
        for name, value in values.items()
    )
    return f'<table class="record"><tbody>{rows}</tbody></table>'


def _flat(values: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            pairs += _flat(value, f"{before}{name}: ")
        else:
            pairs.append((f"{before}{name}", value))
    return pairs


def _name(name: str) -> str:
    return str(name).replace("_", " ")


def _value(value: Any) -> str:
    if value is None:
        return MISSING
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_value, value)) or MISSING
    return str(value)
