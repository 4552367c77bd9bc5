"""What the report's tests share: one made-up assessment, its page written once, and a reader of HTML."""

from pathlib import Path

import pytest
import report_data
from report_reader import Page, read

from tide_export.report.write import write_report


@pytest.fixture(scope="session")
def assessment():
    return report_data.make(n=4000)


@pytest.fixture(scope="session")
def written(assessment, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("report") / "suitability.html"
    write_report(assessment, path)
    return path


@pytest.fixture(scope="session")
def page(written) -> Page:
    return read(written)
