"""`tools/benchmarks/health.py` on the demo bundle: a row, and what misses the goal."""

import json
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def tool() -> ModuleType:
    import health

    return health


def test_health_is_measured_under_an_attack(
    tool: ModuleType, demo_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [str(demo_bundle), "--seconds", "1", "--only", "10,000 stops", "--json", str(tmp_path / "r.json")]
    assert tool.main(line) == 0
    assert "10,000 stops" in capsys.readouterr().out
    (found,) = json.loads((tmp_path / "r.json").read_text()).values()
    assert found["health"]
    assert (found["failed"], found["visits"] > 0) == (0, True)


def test_what_misses_the_goal_is_named(tool: ModuleType) -> None:
    assert tool.missed("a", tool.Measured(health=[0.01, 0.09], gaps=[0.1])) is None
    assert tool.missed("a", tool.Measured(health=[0.01, 0.2], gaps=[0.1])) == "a: /health took 200 ms"
    assert tool.missed("a", tool.Measured(health=[0.01])) == "a: no plain request was answered"
    refused = tool.missed("a", tool.Measured(health=[0.01], failed=1, gaps=[0.1]))
    assert refused == "a: /health did not answer 200 for 1 of 1 times"


def test_every_attack_is_a_request_in_full_or_in_part(tool: ModuleType) -> None:
    sizes = {
        name: len(attack.body if isinstance(attack.body, bytes) else json.dumps(attack.body, separators=(",", ":")))
        for name, attack in tool.ATTACKS.items()
    }
    assert max(sizes.values()) <= 1 << 20  # a server refuses more before it reads it
