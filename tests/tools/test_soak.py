"""`tools/benchmarks/soak.py` on the demo bundle: a sound server passes; wrong answers and what stays are found."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

OTHERS = ("endless", "late")  # kinds that take seconds each


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    import soak
    import soak_visits

    few = {name: replace(kind, count=6) for name, kind in soak_visits.KINDS.items() if name not in OTHERS}
    for module in (soak, soak_visits):
        monkeypatch.setattr(module, "KINDS", few)
    return soak


LINE = ["--minutes", "0.02", "--cores", "2"]


def test_a_sound_server_passes(check: ModuleType, demo_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([str(demo_bundle), *LINE]) == 0
    said = capsys.readouterr().out
    assert "visits, nothing stays" in said
    assert "'same': " in said


def test_another_answer_than_alone_is_found(
    check: ModuleType, demo_bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = check.ask_alone

    async def wrong(port: int, asks: dict) -> None:
        await alone(port, asks)
        for one in asks["plain"]:
            one.alone[0][0] += "x"

    monkeypatch.setattr(check, "ask_alone", wrong)
    assert check.main([str(demo_bundle), *LINE]) == 1
    assert "round 0: plain, " in capsys.readouterr().out


def test_what_stays_is_named(check: ModuleType) -> None:
    first = check.Sample(200 << 20, 10, 50, 2)
    seen = check.Seen(samples=[first] * 100)
    assert list(check.verdict(seen, first, replace(first, threads=12))) == []
    more = replace(first, files=51, children=3)
    assert list(check.verdict(seen, first, more)) == [
        "the server has 3 children, and had 2 at first",
        "the server has 51 files, and had 50 at first",
    ]
    seen.samples = [replace(first, bytes=(200 + number // 10) << 20) for number in range(100)]
    assert list(check.verdict(seen, first, first)) == []
    seen.samples = [replace(first, bytes=(200 + number // 5) << 20) for number in range(100)]
    (reason,) = check.verdict(seen, first, first)
    assert reason.startswith("memory is not level: 2")
