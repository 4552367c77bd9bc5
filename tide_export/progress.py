"""Shows how far a long stage is and how much time is left (a bar on a terminal, log lines elsewhere), and silences the
progress bars and logs of other libraries.

Every stage of making a bundle wraps its slow loop in `stage`. Bars go to stderr, so that stdout stays clean for results
and `--json`; where stderr is not a terminal (CI, a log file) nothing is drawn and the logger "tide_export" gets an INFO
line when the stage ends, and one every `LINE_SECONDS` before.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger("tide_export")

LINE_SECONDS = 30.0


@contextmanager
def stage(title: str, total: float | None = None) -> Iterator[Callable[[float], None]]:
    """Announces a stage; yields `advance(amount)`, to be called as its work is done.

    Args:
        title: what is being done, in the progressive form: "collecting hidden states".
        total: the sum of the amounts given to `advance`; None if unknown (no time left is shown).

    A stage that ends in an exception logs nothing more.
    """
    started = time.perf_counter()
    if sys.stderr.isatty() and logger.level <= logging.INFO:  # not where the user asked for quiet
        with _bar(title, total) as advance:
            yield advance
    else:
        yield _lines(title, total)
    logger.info("%s ... done in %.1f s", title, time.perf_counter() - started)


def duration(seconds: float) -> str:
    """Returns a span of time in words of rough precision: `40 seconds`, `4 minutes`, `2.5 hours`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} second{'s' if round(seconds) > 1 else ''}"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


@contextmanager
def quiet_loggers(level: int, *names: str) -> Iterator[None]:
    """While open, the loggers `names` drop messages below `level`."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [other.level for other in loggers]
    for other in loggers:
        other.setLevel(level)
    try:
        yield
    finally:
        for other, before in zip(loggers, levels, strict=True):
            other.setLevel(before)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """While open, transformers shows no progress bars and logs errors alone, as does accelerate about offloading."""
    from transformers.utils import logging as hf_logging

    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        with quiet_loggers(logging.ERROR, "accelerate.big_modeling"):
            yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()


def _lines(title: str, total: float | None) -> Callable[[float], None]:
    started = shown = time.perf_counter()
    done = 0.0

    def advance(amount: float) -> None:
        nonlocal done, shown
        done, now = done + amount, time.perf_counter()
        if total and 0 < done < total and now - shown >= LINE_SECONDS:
            shown = now
            left = (now - started) * (total - done) / done
            logger.info("%s: %.0f %%, %s left", title, 100 * done / total, duration(left))

    return advance


@contextmanager
def _bar(title: str, total: float | None) -> Iterator[Callable[[float], None]]:
    # Imported here: the runtime uses this module too and must not need more than numpy and its engine.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %")]
    timing = [TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()]
    with Progress(*columns, *timing, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda amount: progress.advance(task, amount)
