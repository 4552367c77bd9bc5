"""`tools/checks/bitwise.py` on tiny bundles: equal logits pass, those of another prompt do not."""

from types import ModuleType

import pytest
from tiny_engines import TinyLlama

from tide_export.runtime.scheduler import Scheduler

FEW = ["--tokens", "1", "--slots", "1,3", "--threads", "1"]


@pytest.fixture(scope="module")
def check() -> ModuleType:
    import bitwise

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
    submit = Scheduler.submit

    def other(scheduler, prompt, **given):
        return submit(scheduler, [(prompt[0] + 1) % 97, *prompt[1:]], **given)

    monkeypatch.setattr(Scheduler, "submit", other)
    assert check.main([str(tiny_llama.exact), *FEW]) == 1
    assert " 0 with other logits" not in capsys.readouterr().out.splitlines()[-1]
