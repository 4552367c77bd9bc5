"""Renders the report's tables as HTML: equal quality, its choices, the routers, and their calibration."""

from collections.abc import Mapping, Sequence
from typing import Any

from tide_export.calibration.assessment import Assessment
from tide_export.report.findings import Findings
from tide_export.report.sentence import HEADLINE, saved_share, speed
from tide_export.report.wording import MISSING, change, escaped, flops, number, percent, threshold


def quality_table(assessment: Assessment, findings: Findings) -> str:
    """Returns a table with one row per bound, and one for the model without exits."""
    headers = ["at most, of both", "changed tokens", "change of perplexity", "layers per token", "expected speed"]
    rows = [["no exits", MISSING, MISSING, number(assessment.evaluation.num_layers, 2), f"{number(1, 2)}x"]]
    for choice in findings.choices:
        changed = choice.outcome.change
        rows.append(
            [
                percent(choice.epsilon),
                f"{percent(changed.changed)} ± {percent(changed.changed_error)}",
                f"{change(changed.perplexity)} ± {percent(changed.perplexity_error)}",
                number(choice.outcome.layers, 2),
                speed(findings, choice),
            ]
        )
    headline = 1 + [choice.epsilon for choice in findings.choices].index(HEADLINE)
    return html_table(headers, rows, headline)


def choices_table(assessment: Assessment, findings: Findings) -> str:
    """Returns a table with one column per bound: where tokens leave, by which thresholds, at what cost."""
    depth, checkpoints = assessment.evaluation.num_layers, assessment.evaluation.checkpoints
    headers = [
        "at most, of both", *(f"leave after {c}, threshold" for c in checkpoints), f"run all {depth}", "layers saved",
        "router efficiency", "compute per token", "mean KL, nats",
    ]  # fmt: skip
    columns = [
        [
            percent(choice.epsilon),
            *(
                f"{percent(share)}, {threshold(limit)}"
                for share, limit in zip(choice.outcome.exit_shares, choice.outcome.thresholds, strict=True)
            ),
            percent(1 - sum(choice.outcome.exit_shares)),
            percent(saved_share(choice, depth)),
            percent(choice.efficiency, 0),
            flops(choice.flops),
            number(choice.outcome.kl, 4),
        ]
        for choice in findings.choices
    ]
    return _by_column(headers, columns)


def routers_table(findings: Findings) -> str:
    """Returns a table with one column per checkpoint."""
    headers = [
        "checkpoint", "changed tokens if all leave here", "may leave (label)", "mean score", "calibration error (ECE)",
        "default threshold", "precision there", "recall there", "tokens that leave here",
    ]  # fmt: skip
    columns = [
        [
            f"after {r.checkpoint}", percent(r.changed), percent(r.positive_rate), percent(r.mean_score),
            percent(r.reliability.error), threshold(r.threshold), percent(r.precision), percent(r.recall),
            percent(share),
        ]
        for r, share in zip(findings.routers, findings.default.exit_shares, strict=True)
    ]  # fmt: skip
    return _by_column(headers, columns)


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


def _by_column(headers: Sequence[str], columns: Sequence[Sequence[str]]) -> str:
    """Returns a table whose first column is `headers`: what each row says."""
    first, *rows = zip(headers, *columns, strict=True)
    return html_table(first, rows)


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
