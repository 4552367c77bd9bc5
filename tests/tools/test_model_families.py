"""`tools/checks/model_families.py`: a row is what running it gave, a row that fails stays and says why, the page has
every family."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import families
import pytest
import transformers as tf

from tide_export.config import TideConfig
from tide_export.errors import CalibrationError, GraphError, UnsupportedModelError
from tide_export.routers.router_set import RouterSet

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def models() -> ModuleType:
    sys.path.insert(0, str(ROOT / "tools" / "checks"))
    try:
        import model_families as models
    finally:
        sys.path.pop(0)
    return models


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """One family of two layers."""
    sizes = {**families.HEADS, "num_hidden_layers": 2}
    monkeypatch.setattr(
        families, "FAMILIES", {"tiny": families.Family(lambda: tf.LlamaConfig(**sizes), ("a|b",), layers=2)}
    )


def test_a_row_is_calibrated_exported_and_compared(models: ModuleType, tiny: None, tmp_path: Path) -> None:
    row = models.make_row(families, "tiny", tmp_path)
    assert row.note == ""
    assert (row.expected, row.onnxruntime, row.layers, row.tensorrt_rtx) == (True, "yes", "2 of 2", "yes")
    assert re.match(r"equal \(\de-0[5-9]\)$", row.full)
    assert row.exit.startswith("equal (")
    assert int(row.seconds) >= 1
    assert "| a\\|b |" in row.markdown()


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
    ("error", "status", "expected"),
    [
        (UnsupportedModelError("LlamaForCausalLM is odd"), "refused", True),
        (GraphError("the graph differs"), "refused", False),
        (RuntimeError("a bug\nwith details"), "fails", False),
    ],
)
def test_a_row_that_fails_stays_and_says_why(
    models: ModuleType,
    tiny: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    status: str,
    expected: bool,
) -> None:
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(models, "export", fail)
    config = families.FAMILIES["tiny"].config
    monkeypatch.setitem(families.FAMILIES, "tiny", families.Family(config, refused="is odd"))
    output = tmp_path / "models.md"
    assert models.main(["-o", str(output)]) == (0 if expected else 1)
    (line,) = [line for line in output.read_text().splitlines() if line.startswith("| tiny |")]
    assert f"| {status} |" in line
    assert str(error).splitlines()[0] in line
    assert "\n" not in line


def test_rows_that_are_run_anew_replace_those_of_the_page(
    models: ModuleType, tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "models.md"
    monkeypatch.setitem(families.FAMILIES, "other", families.FAMILIES["tiny"])
    for note, only in (("old", []), ("new", ["--only", "tiny", "--update"])):
        row = models.Row("tiny", "a", full="equal", exit="equal", onnxruntime="yes", note=note)
        monkeypatch.setattr(models, "make_row", lambda *args, row=row: replace(row, family=args[1]))
        assert models.main(["-o", str(output), *only]) == 0
    lines = [line for line in output.read_text().splitlines() if line.startswith(("| tiny |", "| other |"))]
    assert [line.split(" | ")[-1] for line in lines] == ["new |", "old |"]
    assert "2 of 2 rows are exported and equal" in output.read_text()


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


def test_the_committed_page_has_a_row_for_every_family_as_expected() -> None:
    page = (ROOT / "docs" / "reference" / "models.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line[:2] == "| "]
    found = {row[0].removeprefix("| "): row for row in rows[2:]}
    assert list(found) == list(families.FAMILIES), "run tools/checks/model_families.py"
    for name, family in families.FAMILIES.items():
        assert found[name][5] == ("refused" if family.refused else "yes"), name
        assert found[name][1] == ", ".join(family.features), name
        if not family.refused:
            assert found[name][3].startswith("equal"), name
            assert found[name][4].startswith("equal"), name
