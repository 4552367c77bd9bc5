"""`tools/checks/model_families.py`: a row is what running it gave, a row that fails stays and says why, the page has
every family."""

import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import families
import pytest
import tiers
import transformers as tf

from tide_export.bundle.opened import open_bundle
from tide_export.calibration.config import TideConfig
from tide_export.errors import CalibrationError, GraphError, UnsupportedModelError
from tide_export.routers.router_set import RouterSet
from tide_export.verify.parity import Check

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def models() -> ModuleType:
    import model_families as models

    return models


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """One family of two layers."""
    sizes = {**families.HEADS, "num_hidden_layers": 2}
    monkeypatch.setattr(
        families, "FAMILIES", {"tiny": families.Family(lambda: tf.LlamaConfig(**sizes), ("a|b",), layers=2)}
    )


def test_a_row_is_calibrated_exported_and_compared(
    models: ModuleType, tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not tiers.ALL:  # tests/plans builds such engines too
        monkeypatch.setattr(
            models, "rebuild", lambda bundle, target: open_bundle(bundle).manifest.targets.index(target)
        )
    row = models.make_row(families, "tiny", tmp_path)
    assert row.note == ""
    assert (row.expected, row.tensorrt_rtx) == (True, "yes")
    assert re.match(r"\de-0[5-9]$", row.result)
    assert row.cells() == ("tiny", row.result, "a|b", "")
    assert replace(row, note="slow", tensorrt_rtx="no").cells()[3] == "slow; TensorRT-RTX: no"
    assert replace(row, tensorrt_rtx="TinyForCausalLM keeps recurrent states").cells()[3] == "", "said above the table"


def test_what_differs_in_any_check_is_said_in_place_of_a_number(models: ModuleType) -> None:
    equal = Check("full", "full", [], tokens=4, max_error=2e-6, largest_logit=4.0)
    assert models.verdict([equal, replace(equal, max_error=4e-6, within_tolerance=1)]) == "1e-06, 1 undecided"
    assert models.verdict([equal, replace(equal, wrong=1, differences=["token 3"])]) == "differs: token 3"


def test_where_calibration_has_nothing_to_learn_routers_are_random(
    models: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = []

    def export(model: str, bundle: Path, routers: Path | None = None, **options: Any) -> None:
        given.append(routers)
        if routers is None:
            raise CalibrationError("no checkpoint is left, so there is nothing to learn")

    monkeypatch.setattr(models, "export", export)
    monkeypatch.setattr(models, "load_model", lambda model: families.build("llama"))
    config = TideConfig(checkpoints=(1,), router_bottleneck_dim=16)
    assert models.export_row("model", tmp_path / "bundle", config, None) == ""
    assert given[0] is None
    assert RouterSet.load(given[1]).checkpoints == (1,)

    def fail(*arguments: Any, **options: Any) -> None:
        raise CalibrationError("the text is too short")

    monkeypatch.setattr(models, "export", fail)
    with pytest.raises(CalibrationError, match="too short"):
        models.export_row("model", tmp_path / "bundle", config, None)


@pytest.mark.parametrize(
    ("error", "line", "expected"),
    [
        (UnsupportedModelError("LlamaForCausalLM is odd"), "- tiny: LlamaForCausalLM is odd", True),
        (GraphError("the graph differs"), "- tiny: the graph differs", False),
        (RuntimeError("a bug\nwith details"), "tiny fails - RuntimeError: a bug", False),
    ],
)
def test_a_row_that_fails_stays_and_says_why(
    models: ModuleType,
    tiny: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    line: str,
    expected: bool,
) -> None:
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(models, "export", fail)
    config = families.FAMILIES["tiny"].config
    monkeypatch.setitem(families.FAMILIES, "tiny", families.Family(config, refused="is odd"))
    output = tmp_path / "models.md"
    assert models.main(["-o", str(output)]) == (0 if expected else 1)
    assert [" ".join(found.split()) for found in output.read_text().splitlines() if re.match("(- )?tiny", found)] == [
        line
    ]
    other = families.Family(config, refused="is odd")
    monkeypatch.setitem(families.FAMILIES, "other", other)
    assert models.main(["-o", str(output), "--only", "other", "--update"]) == (0 if expected else 1)
    assert models.read_rows(output).keys() == {"tiny", "other"}, "what was there is kept"


def test_rows_that_are_run_anew_replace_those_of_the_page(
    models: ModuleType, tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "models.md"
    monkeypatch.setitem(families.FAMILIES, "other", families.FAMILIES["tiny"])
    for note, only in (("old", []), ("new", ["--only", "tiny", "--update"])):
        row = models.Row("tiny", "a", result="1e-07", note=note)
        monkeypatch.setattr(models, "make_row", lambda *args, row=row: replace(row, family=args[1]))
        assert models.main(["-o", str(output), *only]) == 0
    rows = [("tiny", "1e-07", "a", "new"), ("other", "1e-07", "a", "old")]
    assert list(models.read_rows(output).values()) == rows
    assert "2 of 2 are exported and equal" in output.read_text()


def test_rows_are_chosen_by_name(models: ModuleType, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        models.main(["--only", "no such family"])
    assert "no family 'no such family'" in capsys.readouterr().err


def test_every_class_of_transformers_has_a_row_or_a_reason(
    models: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert models.main(["--classes"]) == 0
    listed = capsys.readouterr().out
    assert "\nLlamaForCausalLM: llama, llama (3.1), llama (linear), llama (dynamic)\n" in listed
    for name, why in families.UNBUILT.items():
        assert f"\n{name}: {why}\n" in listed
    others = {name: row for name, row in families.FAMILIES.items() if name != "mistral"}
    monkeypatch.setattr(families, "FAMILIES", others)
    assert models.main(["--classes"]) == 1
    assert "\nMistralForCausalLM: no row yet\n" in capsys.readouterr().out


def test_shares_of_classes_are_of_all_and_of_causal_language_models(models: ModuleType) -> None:
    equal = [name for name, family in families.FAMILIES.items() if not family.refused]
    text = " ".join(models.classes(equal, families).split())
    assert "174 have rows here; 165 of them (94.8 %) are exported and equal in all rows" in text
    assert "of the 171 that are causal language models on token ids, 96.5 %" in text, "without XLNet, CPM-Ant, Gemma's"
    assert "; 0 of them (0.0 %)" in models.classes([], families)


def test_the_committed_page_has_a_row_for_every_family_as_expected(models: ModuleType) -> None:
    found = models.read_rows(ROOT / "docs" / "reference" / "models.md")
    assert found.keys() == families.FAMILIES.keys(), "run tools/checks/model_families.py"
    exported = [name for name, family in families.FAMILIES.items() if not family.refused]
    assert [name for name, row in found.items() if row[1] != "refused"] == exported
    for name in exported:
        assert found[name][2] == (", ".join(families.FAMILIES[name].features) or "-"), name
        assert re.match(r"\de-\d\d", found[name][1]), name
