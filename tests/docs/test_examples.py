"""Every example runs, on the demo model."""

import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from documents import ROOT, script_folder

import tide_export

EXAMPLES = ROOT / "examples"
ELSEWHERE = {"embed_cpp": "tests/embedding/test_cpp.py"}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, unpictured: None, capsys) -> Callable[..., str]:
    """Runs an example as its own process would, and gives what it printed."""

    def runs(example: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [example, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / example), run_name="__main__")
        return capsys.readouterr().out

    return runs


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A little text to calibrate on."""
    lines = (ROOT / "calibration" / "text" / "python-stdlib.jsonl").read_text().splitlines()
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    path.write_text("".join(json.dumps({"text": json.loads(line)["text"][:400]}) + "\n" for line in lines))
    return path


def test_each_example_has_a_test() -> None:
    tested = set(re.findall(r'"(\w+(?:\.py|\.sh)?)"', Path(__file__).read_text()))
    examples = {path.name for path in EXAMPLES.iterdir() if path.name not in ("README.md", "__pycache__")}
    assert examples <= tested
    assert examples == set(re.findall(r"^\| `([\w.]+)/?`", (EXAMPLES / "README.md").read_text(), re.MULTILINE))


def test_quickstart(demo_bundle: Path, tmp_path: Path) -> None:
    command = ["sh", EXAMPLES / "quickstart.sh", demo_bundle]
    done = subprocess.run(command, env=script_folder(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "def read_lines(path):" in done.stdout
    assert "layers per token" in done.stderr
    assert re.search(r"^  exit +[\d.]+ +[\d.]+x", done.stdout, re.MULTILINE), done.stdout


def test_your_own_model(run: Callable[..., str], demo_model: Path, text: Path, tmp_path: Path) -> None:
    assert "HOLDS" in run("your_own_model.py", demo_model, text, tmp_path / "bundle")


def test_calibrate_on_your_text(run: Callable[..., str], demo_model: Path, text: Path, tmp_path: Path) -> None:
    run("calibrate_on_your_text.py", demo_model, text, tmp_path / "bundle")
    assert (tmp_path / "gains.html").is_file()
    record = tide_export.load(tmp_path / "bundle").manifest.calibration
    assert record["config"]["exit_strategy"] == "auto"
    assert record["exit_strategy"] == (
        "lens" if any(entry["lens"]["used"] for entry in record["report"].values()) else "identity"
    )


def test_tune_a_guarantee(
    run: Callable[..., str], demo_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune, fewer = tide_export.tune, {"prompts": 45, "prompts_per_document": 12, "positions": 1}
    monkeypatch.setattr(tide_export, "tune", lambda *given, **options: tune(*given, **options | fewer), raising=False)
    bundle = shutil.copytree(demo_bundle, tmp_path / "bundle")
    validation = ROOT / "calibration" / "text" / "python-stdlib-validation.jsonl"
    assert "layers per token" in run("tune_a_guarantee.py", bundle, validation)
    assert tide_export.load(bundle).manifest.tuning is not None


def test_lossless(run: Callable[..., str], demo_bundle: Path) -> None:
    assert "drafts accepted" in run("lossless.py", demo_bundle)


def test_embed_python(run: Callable[..., str], demo_bundle: Path) -> None:
    printed = run("embed_python.py", demo_bundle)
    assert printed.count("--- ") == 3
    assert "refused: " in printed


def test_import_tide_routers(run: Callable[..., str], demo_model: Path, tmp_path: Path) -> None:
    import torch

    torch.manual_seed(0)  # a router.pt as TIDE 0.2.1 saves it
    weights = {"down.weight": torch.randn(16, 128), "up.weight": torch.randn(1, 16)}
    content = {"hidden_dim": 128, "bottleneck_dim": 16, "router_layers": dict.fromkeys((2, 5, 8), weights)}
    torch.save(content, tmp_path / "router.pt")
    printed = run("import_tide_routers.py", demo_model, tmp_path / "router.pt", tmp_path / "bundle")
    assert "checkpoints after (3, 6, 9) layers" in printed
