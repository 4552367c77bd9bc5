"""Writes the suitability report, an HTML page and a PNG: whether a model gains from early exits.

`Assessment` -> findings (numbers) -> verdict (a sentence) -> plots and page -> files. Call `check_report_path` before
the hours of calibration and `write_report` after them. Needs matplotlib (extra `export`).
"""

import os
from pathlib import Path

from tide_export.calibration.assessment import Assessment
from tide_export.common.files import check_writable, failure, replace_files
from tide_export.errors import ConfigError
from tide_export.report.findings import investigate
from tide_export.report.page import render
from tide_export.report.plots import overview
from tide_export.report.sentence import verdict

__all__ = ["check_report_path", "headline", "write_report"]


def check_report_path(path: str | os.PathLike[str]) -> None:
    """Checks that `write_report` can write to a path; leaves no file.

    Raises:
        ConfigError: the suffix is not .html, the path is a folder, or its folder is missing or not writable.
    """
    target = Path(path)
    if target.suffix != ".html":
        raise ConfigError(f"report {target} must end in .html")
    for file in (target, target.with_suffix(".png")):
        if file.is_dir():
            raise ConfigError(f"report {target} cannot be written: {file} is a folder")
    if not target.parent.is_dir():
        raise ConfigError(f"report {target} cannot be written: there is no folder {target.parent}")
    try:
        check_writable(target)
    except OSError as error:
        reason = failure(error, target.parent)
        raise ConfigError(f"report {target} cannot be written to {target.parent}: {reason}") from None


def headline(assessment: Assessment) -> str:
    """Returns the report's first sentence, for the log.

    Raises:
        CalibrationError: there are fewer than two held-out tokens.
    """
    return verdict(assessment, investigate(assessment)).sentence


def write_report(assessment: Assessment, path: Path) -> str:
    """Writes the page to `path` and its main panels to a PNG of the same name; returns its first sentence.

    Both files are complete before either replaces an existing one.

    Raises:
        ConfigError: as `check_report_path` raises it, or the disk is full.
        CalibrationError: there are fewer than two held-out tokens.
    """
    target = Path(path)
    check_report_path(target)
    findings = investigate(assessment)
    answer = verdict(assessment, findings)
    contents = {
        target.with_suffix(".png"): overview(assessment, findings, answer.sentence),
        target: render(assessment, findings, answer).encode("utf-8"),
    }
    try:
        replace_files(contents)
    except OSError as error:
        raise ConfigError(f"report {target} cannot be written: {failure(error, target.parent)}") from None
    return answer.sentence
