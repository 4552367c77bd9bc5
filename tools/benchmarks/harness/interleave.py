"""Times interleaved cases, summarizes the times, compares them with goals and plots them.

A case is a function that prepares untimed and returns the seconds of one measurement. Each round measures every case
once, in a new random order, so that a busy moment of the machine, and the caches that the previous case filled, affect
all of them alike. Only ratios within one run mean anything.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from tide_export.formatting import table

Case = Callable[[], float]
Seconds = dict[str, list[float]]
UNTIMED = 3  # rounds after loading that pay for memory and caches


class Goal(NamedTuple):
    """The median of `case` should be at most `limit` times that of `against`."""

    what: str
    case: str
    against: str
    limit: float


def interleave(cases: Mapping[str, Case], rounds: int, order: random.Random, seconds: Seconds) -> None:
    """Adds `rounds` measurements of every case to `seconds`, after some that are not counted."""
    for number in range(rounds + UNTIMED):
        for name in order.sample(list(cases), len(cases)):
            elapsed = cases[name]()
            if number >= UNTIMED:
                seconds.setdefault(name, []).append(elapsed)


def summary(seconds: Seconds, names: Sequence[str], base: str, goals: Sequence[Goal]) -> dict:
    """Medians and fastest tenths in milliseconds, ratios to `base`, and whether the goals are met.

    Of `names`, in their order, those that were measured. A goal that lacks one of its cases is not met and says so.
    """
    measured = [name for name in names if seconds.get(name)]
    medians = {name: 1e3 * median(seconds[name]) for name in measured}
    judged = []
    for what, case, against, limit in goals:
        known = case in medians and against in medians
        ratio = medians[case] / medians[against] if known else None
        judged.append({"goal": what, "ratio": ratio, "limit": limit, "met": ratio is not None and ratio <= limit})
    return {
        "median_ms": medians,
        "p10_ms": {name: 1e3 * float(np.percentile(seconds[name], 10)) for name in measured},
        "relative": {name: value / medians[base] for name, value in medians.items()},
        "goals": judged,
    }


def render_table(result: dict, base: str) -> str:
    rows = [
        [name, f"{value:.3f}", f"{result['p10_ms'][name]:.3f}", f"{result['relative'][name]:.3f}"]
        for name, value in result["median_ms"].items()
    ]
    return "\n".join([table(["case", "median ms", "p10 ms", f"x {base}"], rows), *goal_lines(result["goals"])])


def goal_lines(goals: Sequence[dict]) -> list[str]:
    lines = []
    for goal in goals:
        if goal["ratio"] is None:
            lines.append(f"NOT MEASURED {goal['goal']}")
        else:
            verdict = "met" if goal["met"] else "MISSED"
            lines.append(f"{verdict:7s} {goal['goal']}: {goal['ratio']:.3f} (limit {goal['limit']:.3f})")
    return lines


def plot(result: dict, path: Path, xlabel: str, title: str) -> None:
    """A bar for every case, labelled with its ratio to the base."""
    from matplotlib.figure import Figure

    names = list(result["median_ms"])
    figure = Figure(figsize=(8, 0.6 * len(names) + 1.2), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(names, [result["median_ms"][name] for name in names], color="tab:blue")
    axes.bar_label(bars, [f"{result['relative'][name]:.2f}x" for name in names], padding=3)
    axes.invert_yaxis()
    axes.set_xlabel(xlabel)
    figure.suptitle(title, wrap=True)  # over the whole figure: over the axes alone a long name would be cut
    axes.margins(x=0.12)
    figure.savefig(path, dpi=120)


def write_json(result: dict, path: Path) -> None:
    path.write_text(json.dumps(result, indent=2) + "\n")
