"""`tools/checks/company.py` on tiny bundles: equal results pass, those of another prompt do not; a round runs again."""

import re
from types import ModuleType

import pytest
from tiny_engines import TinyLlama

from tide_export.runtime.scheduler import Scheduler


@pytest.fixture(scope="module")
def check() -> ModuleType:
    import company

    return company


def test_what_a_request_gets_does_not_depend_on_its_company(
    check: ModuleType, tiny_llama: TinyLlama, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main([*[str(tiny_llama.exact)] * 2, "--cases", "200"]) == 0
    said = capsys.readouterr().out
    kinds = re.findall(r"(scheduler|list|two threads|mode full) +\d+ +0\n", said)
    assert kinds == ["scheduler", "list", "two threads", "mode full"] * 2
    cases, differ = map(int, re.findall(r"(\d+) cases, (\d+) differ", said)[0])
    assert cases >= 200
    assert differ == 0


def test_other_results_are_found_and_their_round_runs_again(
    check: ModuleType, tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    submit = Scheduler.submit

    def other(scheduler, prompt, *given):
        return submit(scheduler, [(prompt[0] + 1) % 97, *prompt[1:]], *given)

    monkeypatch.setattr(Scheduler, "submit", other)
    assert check.main([str(tiny_llama.exact), "--cases", "20"]) == 1
    said = capsys.readouterr().out
    again = re.findall(r"differs: scheduler: python tools/checks/company.py (.*)\n", said)[-1].split()
    assert check.main(again) == 1
    assert capsys.readouterr().out.count("differs: scheduler") == 1
    monkeypatch.undo()
    assert check.main(again) == 0
