"""Fixtures that omit what takes seconds and has tests of its own; conftest makes a plugin of them."""

import pytest

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def unpictured(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_pictures_out(monkeypatch)


def leave_pictures_out(patch: pytest.MonkeyPatch) -> None:
    """Writes reports without their pictures, which take seconds: tests/report draws them."""
    patch.setattr("tide_export.report.plots.pngs", lambda _, *themes: [PNG] * len(themes))
    patch.setattr("tide_export.report.write.overview", lambda *_: PNG)


@pytest.fixture
def few_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """`draft` reads few of its own prompts, and measures on two of them."""
    monkeypatch.setattr("tide_export.drafting.prompts.MAX_PROMPTS", 300)
    monkeypatch.setattr("tide_export.drafting.flow.MEASURED_PROMPTS", 2)
