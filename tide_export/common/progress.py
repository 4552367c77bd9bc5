"""Shows the progress of long stages, and silences the progress bars and logs of other libraries.

Every stage of making a bundle wraps its slow loop in `stage`. On a terminal it draws a bar on stderr, so that stdout
has only results and `--json`. Elsewhere (CI, a log file) the logger "tide_export" gets an INFO line every
`LINE_SECONDS` and when the stage ends.
"""

import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger("tide_export")

LINE_SECONDS = 30.0


@contextmanager
def stage(title: str, total: float | None = None) -> Iterator[Callable[[float], None]]:
    """Announces a stage and yields `advance(amount)`, to be called as work is done.

    A stage that ends in an exception logs nothing more.

    Args:
        title: the work in the progressive form, such as "collecting hidden states".
        total: sum of the amounts given to `advance`; None: unknown, no remaining time is shown.
    """
    started = time.perf_counter()
    if sys.stderr.isatty() and logger.level <= logging.INFO:  # no bar with --quiet
        with _bar(title, total) as advance:
            yield advance
    else:
        yield _lines(title, total)
    logger.info("%s ... done in %.1f s", title, time.perf_counter() - started)


def duration(seconds: float) -> str:
    """Returns a duration as rounded text: `40 seconds`, `4 minutes`, `2.5 hours`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} second{'s' if round(seconds) > 1 else ''}"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


@contextmanager
def quiet_loggers(level: int, *names: str) -> Iterator[None]:
    """Drops messages of the loggers `names` below `level` while the context is open."""
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
    """Hides transformers' progress bars and its and accelerate's warnings while the context is open.

    And Python's warnings that a model's own code uses what transformers will remove.
    """
    from transformers.utils import logging as hf_logging

    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        with quiet_loggers(logging.ERROR, "accelerate.big_modeling"), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
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
