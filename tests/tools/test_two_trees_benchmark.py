"""tools/benchmarks/two_trees.py compares a checkout with itself."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_every_case_gets_a_ratio(demo_bundle: Path) -> None:
    import two_trees

    ratios = two_trees.compare(ROOT, str(demo_bundle), 1, 1, 1)
    assert set(ratios) == {"full", "exit", "lossless", "prompt of 512", "8 streams", "16 streams"}
    assert all(0.05 < ratio < 20 for ratio in ratios.values())


def test_other_tokens_are_refused(demo_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import two_trees

    real = two_trees.asked
    answers: list[dict] = []

    def changed(process) -> dict:
        answers.append(real(process))
        if len(answers) > 3:
            answers[-1]["full"]["tokens"] = [1]
        return answers[-1]

    monkeypatch.setattr(two_trees, "asked", changed)
    with pytest.raises(SystemExit, match="the tokens of 'full' differ"):
        two_trees.compare(ROOT, str(demo_bundle), 1, 2, 1)
