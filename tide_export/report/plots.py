"""Draws the report's plots as PNGs; a panel is a function that draws on one axes.

Figures are drawn on matplotlib's Agg canvas, never through pyplot, so a program that uses pyplot is not affected.
"""

import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tide_export.calibration.assessment import Assessment, Outcome
from tide_export.calibration.calibration_error import Reliability
from tide_export.report.findings import Findings, RouterFinding, fixed_flops
from tide_export.report.theme import LIGHT, Theme
from tide_export.report.wording import NARROW

SIZE = (5.4, 3.9)  # inches of one panel
DPI = 130
CURVE_POINTS = 400
MARKERS = "osD^vP*XhH<>"
PERCENT = FuncFormatter(lambda value, _: f"{round(100 * value, 6):g} %")

Panel = Callable[[Axes, Theme], None]


def pngs(panel: Panel, *themes: Theme) -> list[bytes]:
    """Draws a panel as a PNG in each theme, with one layout for all."""
    pictures: list[bytes] = []
    sides: dict[str, float] = {}
    for theme in themes:
        with rc_context(_style(theme)):
            figure = Figure(figsize=SIZE, dpi=DPI, layout=None if sides else "tight")
            panel(figure.add_subplot(), theme)
            figure.subplots_adjust(**sides)
            pictures.append(_bytes(figure))
        sides = sides or {side: getattr(figure.subplotpars, side) for side in ("left", "bottom", "right", "top")}
    return pictures


def overview(assessment: Assessment, findings: Findings, sentence: str) -> bytes:
    """Draws the main panels on one PNG, with the verdict above them."""
    with rc_context(_style(LIGHT)):
        figure = Figure(figsize=(16.2, 9.6), dpi=110, layout="constrained")
        answer = textwrap.fill(sentence.replace(NARROW, " "), 150)
        figure.suptitle(answer, x=0.01, ha="left", fontsize=13, parse_math=False)
        panels = [
            quality_panel(assessment, findings, "changed", "layers", close=True),
            quality_panel(assessment, findings, "kl", "layers"),
            exits_panel(assessment, findings),
            convergence_panel(assessment, "changed"),
            precision_recall_panel(findings),
            reliability_panel(findings.routers),
        ]
        for panel, axes in zip(panels, figure.subplots(2, 3).flat, strict=True):
            panel(axes, LIGHT)
        return _bytes(figure)


def convergence_panel(assessment: Assessment, what: str) -> Panel:
    """Plots `changed`, `cosine` or `kl` over layers run, with the checkpoints marked."""
    convergence = assessment.convergence
    values = np.asarray(getattr(convergence, what), dtype=float)
    titles = {
        "changed": ("Likeliest token of each layer's state", "changed tokens, greedy"),
        "cosine": ("Direction of each layer's state", "cosine similarity with the last layer"),
        "kl": ("Distribution of each layer's state", "KL divergence from the full model, nats"),
    }

    def draw(axes: Axes, theme: Theme) -> None:
        colours = theme.checkpoints(len(assessment.evaluation.checkpoints))
        for i, (checkpoint, colour) in enumerate(zip(assessment.evaluation.checkpoints, colours, strict=True)):
            label = "checkpoints" if i == len(colours) // 2 else None
            axes.axvline(checkpoint, color=colour, linewidth=5, alpha=0.35, zorder=0, label=label)
        axes.plot(convergence.layers, values, color=theme.best, marker="o", markersize=4)
        axes.set(title=titles[what][0], xlabel="layers run", ylabel=titles[what][1])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if what == "changed":
            axes.yaxis.set_major_formatter(PERCENT)
            axes.set_ylim(-0.02, 1.04)
        elif what == "kl":
            axes.set_ylim(bottom=min(0.0, float(np.nanmin(values))))
        axes.legend(loc="best")

    return draw


def learning_panel(reports: Mapping[int, Mapping[str, Any]], what: str) -> Panel:
    """Plots `may_exit` or `kl` on validation tokens over the tokens that lenses were fitted to."""
    titles = {"may_exit": "tokens that may exit", "kl": "KL divergence from the full model, nats"}

    def draw(axes: Axes, theme: Theme) -> None:
        for (layers, report), colour in zip(reports.items(), theme.checkpoints(len(reports)), strict=True):
            curve = report["curve"]
            axes.plot(
                curve["tokens"],
                curve[what],
                color=colour,
                linestyle="-" if report["used"] else "--",
                marker="o",
                markersize=4,
                label=f"after {layers}",
            )
        axes.set(title="Lenses", xlabel="tokens they were fitted to", ylabel=titles[what])
        if what == "may_exit":
            axes.yaxis.set_major_formatter(PERCENT)
        axes.set_ylim(bottom=0.0)
        axes.legend(loc="best")

    return draw


def exits_panel(assessment: Assessment, findings: Findings) -> Panel:
    """Plots the share of tokens that exit at each checkpoint by default, and that run all layers."""
    checkpoints, shares = assessment.evaluation.checkpoints, findings.default.exit_shares

    def draw(axes: Axes, theme: Theme) -> None:
        colours = theme.checkpoints(len(checkpoints))
        heights = [*shares, max(0.0, 1 - sum(shares))]
        positions = [*range(len(shares)), len(shares) + 0.5]
        bars = axes.bar(positions, heights, color=[*colours, theme.full], edgecolor=theme.ink, linewidth=0.6)
        bars[-1].set_hatch("//")
        axes.bar_label(bars, [f"{100 * height:.1f} %" for height in heights], padding=2, fontsize=9)
        axes.axvline(len(shares) - 0.25, color=theme.faint, linestyle=":")
        axes.set_xticks(positions, [*map(str, checkpoints), f"all {assessment.evaluation.num_layers}\n(no exit)"])
        axes.set(title="Where tokens leave by default", xlabel="layers run", ylabel="tokens")
        axes.set_ylim(0, 1.14 * max(heights))
        axes.yaxis.set_major_formatter(PERCENT)
        axes.grid(axis="x", visible=False)

    return draw


def precision_recall_panel(findings: Findings) -> Panel:
    """Plots precision over recall of each router at every threshold, with the default marked."""

    def draw(axes: Axes, theme: Theme) -> None:
        lowest = 1.0
        for i, (router, colour) in enumerate(
            zip(findings.routers, theme.checkpoints(len(findings.routers)), strict=True)
        ):
            name = f"after {router.checkpoint}"
            if not len(router.recall_curve):
                axes.plot([], [], color=colour, label=f"{name}: no token may leave")
                continue
            rows = np.unique(np.linspace(0, len(router.recall_curve) - 1, CURVE_POINTS).astype(int))
            # The first few exits say little about a router: one wrong token of two is a precision of a half.
            steady = router.recall_curve[rows] >= 0.01
            axes.plot(router.recall_curve[rows], router.precision_curve[rows], color=colour, label=name)
            lowest = min(lowest, float(router.precision_curve[rows][steady].min()))
            if np.isfinite(router.precision):
                axes.plot(router.recall, router.precision, MARKERS[i % len(MARKERS)], **_dot(colour, theme))
                lowest = min(lowest, router.precision)
        axes.set(title="Routers: precision and recall", ylabel="precision (exits that may leave)")
        axes.set_xlabel("recall (tokens that may leave, and do)")
        axes.set_xlim(-0.02, 1.02)
        axes.set_ylim(max(-0.02, lowest - 0.05), 1.01)
        _percent_axes(axes)
        columns = 1 if len(findings.routers) < 5 else 2
        axes.legend(loc="lower left", title="marked: default threshold", title_fontsize=8, ncols=columns)

    return draw


def reliability_panel(routers: Sequence[RouterFinding], shown: int | None = None) -> Panel:
    """Plots the share of tokens that may exit over the score, for router `shown` or all."""

    def draw(axes: Axes, theme: Theme) -> None:
        colours = theme.checkpoints(len(routers))
        axes.plot([0, 1], [0, 1], color=theme.fixed, linestyle="--", linewidth=1, label="score = probability")
        for i, (router, colour) in enumerate(zip(routers, colours, strict=True)):
            if shown is None or shown == i:
                bins: Reliability = router.reliability
                label = f"after {router.checkpoint}: ECE {100 * bins.error:.1f} %"
                axes.plot(bins.score, bins.share, color=colour, marker=MARKERS[i % len(MARKERS)], label=label)
        title = "Are scores probabilities?" if shown is None else f"Score after {routers[shown].checkpoint} layers"
        axes.set(title=title, xlabel="mean score of the bin", ylabel="tokens of the bin that may leave")
        axes.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))
        _percent_axes(axes)
        axes.legend(loc="upper left")

    return draw


def quality_panel(assessment: Assessment, findings: Findings, quality: str, cost: str, close: bool = False) -> Panel:
    """Plots a quality (`changed`, `perplexity`, `kl`) over a cost (`layers`, `flops`) per token.

    Args:
        close: show only the range where few tokens are changed.
    """
    titles = {
        "changed": "Changed tokens",
        "kl": "Distance from the full model",
        "perplexity": "Perplexity of full depth's tokens",
    }
    labels = {
        "changed": "changed tokens",
        "kl": "mean KL divergence, nats",
        "perplexity": "change of perplexity",
    }
    depth, checkpoints, costs = assessment.evaluation.num_layers, assessment.evaluation.checkpoints, assessment.costs
    scale = 10 ** (3 * int(np.log10(max(findings.full_flops, 1.0)) // 3))
    unit = {1: "FLOP", 10**3: "kFLOP", 10**6: "MFLOP", 10**9: "GFLOP", 10**12: "TFLOP"}.get(scale, f"{scale:.0e} FLOP")

    def x(outcomes: Sequence[Outcome], routed: bool = True) -> list[float]:
        if cost == "layers":
            return [outcome.layers for outcome in outcomes]
        price = (lambda o: costs.per_token(o, checkpoints)) if routed else (lambda o: fixed_flops(costs, o))
        return [price(outcome) / scale for outcome in outcomes]

    def y(outcomes: Sequence[Outcome]) -> list[float]:
        return [outcome.kl if quality == "kl" else getattr(outcome.change, quality) for outcome in outcomes]

    def draw(axes: Axes, theme: Theme) -> None:
        axes.set_title(f"{titles[quality]}{', close up' if close else ''}")
        axes.set_xlabel("mean layers per token" if cost == "layers" else f"{unit} per token")
        axes.set_ylabel(labels[quality])
        full = depth if cost == "layers" else findings.full_flops / scale
        axes.axvline(full, color=theme.faint, linewidth=1)
        axes.plot(
            x(findings.fixed, False), y(findings.fixed), "s:", color=theme.fixed, label="all leave at one checkpoint"
        )
        if not close:
            for checkpoint, at, value in zip(checkpoints, x(findings.fixed, False), y(findings.fixed), strict=True):
                axes.annotate(
                    str(checkpoint), (at, value), (5, 4), textcoords="offset points", fontsize=8, color=theme.fixed
                )
        axes.plot(x(findings.sweep), y(findings.sweep), "--", color=theme.single, label="one threshold for all")
        axes.plot(x(findings.curve), y(findings.curve), ".-", color=theme.best, linewidth=2.4, label="best thresholds")
        default = [findings.default_measured]
        axes.plot(x(default), y(default), "D", label="the bundle's default", **_dot(theme.best, theme))
        perfect = [findings.perfect]
        axes.plot(x(perfect, False), y(perfect), "*", label="a perfect router", **_dot(theme.perfect, theme, 14))
        axes.set_xlim(0, 1.04 * full)
        _quality_axis(axes, quality, close)
        axes.legend(loc="lower left" if quality != "changed" else "upper left" if close else "upper right")

    return draw


def _quality_axis(axes: Axes, quality: str, close: bool) -> None:
    if quality == "changed":
        axes.yaxis.set_major_formatter(PERCENT)
        axes.set_ylim(*((-0.005, 0.105) if close else (-0.02, 1.04)))
        return
    # A fixed exit is off by a hundred times as much as chosen thresholds; both must be readable.
    axes.set_yscale("symlog", linthresh=0.01, linscale=0.5)
    low, high = axes.dataLim.intervaly
    axes.set_ylim(0 if quality == "kl" else min(2 * low, -0.005), max(2 * high, 0.02))
    if quality == "kl":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:+,.3g} %" if value else "0 %"))


def _percent_axes(axes: Axes) -> None:
    axes.xaxis.set_major_formatter(PERCENT)
    axes.yaxis.set_major_formatter(PERCENT)


def _dot(colour: str, theme: Theme, size: float = 8) -> dict[str, Any]:
    return {"color": colour, "markeredgecolor": theme.ink, "markersize": size, "zorder": 5}


def _style(theme: Theme) -> Any:  # matplotlib's stubs require every key as a Literal
    return {
        "text.usetex": False,
        "figure.facecolor": theme.paper,
        "savefig.facecolor": theme.paper,
        "axes.facecolor": theme.paper,
        "axes.edgecolor": theme.fixed,
        "axes.labelcolor": theme.ink,
        "axes.titlecolor": theme.ink,
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": theme.faint,
        "grid.linewidth": 0.6,
        "text.color": theme.ink,
        "xtick.color": theme.ink,
        "ytick.color": theme.ink,
        "legend.fontsize": 8.5,
        "legend.framealpha": 0.85,
        "legend.facecolor": theme.paper,
        "legend.edgecolor": theme.faint,
        "font.size": 10,
        "font.family": ["DejaVu Sans"],
        "hatch.linewidth": 0.5,
    }


def _bytes(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()
