"""The prompts that the measured drafters learned from: the same each time, of two kinds, none of the benchmarks'."""

import sys
from pathlib import Path

import pytest

from tide_export.common.prompt_files import Beginning, read_prompts

BENCHMARKS = Path(__file__).parents[2] / "tools" / "benchmarks" / "prompts"


def test_half_are_messages_and_half_are_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import draft_prompts

    made = [tmp_path / "some" / name for name in ("one.jsonl", "two.jsonl")]
    for file in made:
        monkeypatch.setattr(sys, "argv", ["draft_prompts.py", str(file), "--count", "400"])
        draft_prompts.main()
    assert made[0].read_bytes() == made[1].read_bytes()
    prompts = read_prompts(made[0])
    code = [prompt for prompt in prompts if isinstance(prompt, Beginning)]
    assert len(prompts) - len(code) == 200
    assert len(code) > 180
    assert all(prompt.strip() for prompt in prompts)
    assert len(set(prompts)) == len(prompts)
    measured = {prompt for file in BENCHMARKS.glob("*.*") if file.suffix != ".md" for prompt in read_prompts(file)}
    assert len(measured) == 200
    assert not measured & set(prompts)
