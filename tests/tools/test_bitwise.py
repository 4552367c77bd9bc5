"""`tools/checks/bitwise.py` on tiny bundles: equal logits pass, those of another prompt do not."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
from tiny_engines import TinyLlama

FEW = ["--tokens", "1", "--slots", "1,3", "--threads", "1"]


@pytest.fixture(scope="module")
def check() -> ModuleType:
    folder = str(Path(__file__).parents[2] / "tools" / "checks")
    sys.path.insert(0, folder)
    try:
        import bitwise
    finally:
        sys.path.remove(folder)
    return bitwise


@pytest.mark.parametrize("kind", ["exact", "propagating"])
def test_logits_do_not_depend_on_what_shares_a_batch(
    check: ModuleType, tiny_llama: TinyLlama, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main([str(getattr(tiny_llama, kind)), *FEW]) == 0
    modes = 3 if kind == "exact" else 2
    compared = 2 * 24 * (4 * modes + (kind == "exact"))  # two prompts, 24 tokens; and lossless beside full
    assert f"{compared} tokens, 0 with other logits" in capsys.readouterr().out


def test_other_logits_are_found(
    check: ModuleType, tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted = check.submitted

    def other(scheduler, prompts, number, given):
        return submitted(scheduler, [[(ids[0] + 1) % 97, *ids[1:]] for ids in prompts], number, given)

    monkeypatch.setattr(check, "submitted", other)
    assert check.main([str(tiny_llama.exact), *FEW]) == 1
    assert " 0 with other logits" not in capsys.readouterr().out.splitlines()[-1]
