"""The card of a bundle in a repository: its metadata, its commands and the tables of what the bundle records."""

import html
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from bundles import make_manifest, write
from hub_server import Hub
from huggingface_hub import ModelCard

from tide_export.bundle.auto_mode import AutoMode
from tide_export.bundle.manifest import Quantization
from tide_export.cli.main import main
from tide_export.cli.options import build_parser
from tide_export.hub.card import EXIT_COLUMNS

POINT = {"epsilon": 0.02, "perplexity_epsilon": 0.02, "thresholds": [0.75, 1.0], "changed": 0.0117, "layers": 2.25}
POINT |= {"saved": 0.2, "tokens": 1234, "temperature": 0.8, "changed_error": 0.002, "perplexity": 0.0123}
POINT |= {"perplexity_error": 0.004}
ROUTER = {"threshold": 0.85, "positive_rate": 0.5, "exit_rate": 0.25, "precision": None, "recall": 0.125, "ece": 0.03}
CALIBRATION = {"dataset": "my | text", "operating_points": [POINT], "report": {"2": ROUTER, "1": ROUTER}}
TUNING = {
    "certified": True,
    "epsilon": 0.05,
    "delta": 0.1,
    "layers_per_token": 1.5,
    "thresholds": [0.5, 1.0],
    "min_layers": 2,
}


def card(hub: Hub, bundle: Path, *options: str) -> ModelCard:
    assert main(["push", "-q", str(bundle), "me/demo", *options]) == 0
    return ModelCard(hub.repositories["me/demo"].files()["README.md"].decode())


def tables(text: str) -> list[list[list[str]]]:
    """Rows of cells of each table."""
    blocks = re.findall(r"(?:^\|.*\|$\n?)+", text, re.MULTILINE)
    split = [[re.split(r" (?<!\\)\| ", line.strip("| ")) for line in block.splitlines()] for block in blocks]
    return [[rows[0], *rows[2:]] for rows in split]


def test_a_model_of_the_hub_is_named_with_its_license(hub: Hub, tmp_path: Path) -> None:
    hub.make("org/model", card={"license": "other", "license_name": "of-model", "tags": ["not mine"]})
    int4 = Quantization("rtn", 4, 32, True, 4)
    manifest = replace(make_manifest("org/model"), quantization=int4, weights="int4")
    made = card(hub, write(tmp_path / "made", manifest=manifest))
    assert made.data.to_dict() == {
        "base_model": "org/model",
        "base_model_relation": "quantized",
        "library_name": "tide_export",
        "license": "other",
        "license_name": "of-model",
        "pipeline_tag": "text-generation",
        "tags": ["tide_export", "early-exit", "onnx", "int4"],
    }
    assert "# org/model with early exits" in made.text


@pytest.mark.parametrize("name", ["here", "/home/me/models/llama", "org/none"])
def test_a_folder_is_not_taken_for_a_model_of_the_hub(hub: Hub, tmp_path: Path, monkeypatch, name: str) -> None:
    hub.make("org/here")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    made = card(hub, write(tmp_path / "made", manifest=make_manifest(name)))
    assert made.data.base_model is None
    assert made.data.license is None
    assert f"# {Path(name).name} with early exits" in made.text
    assert "/home/me" not in made.text


def test_the_tables_of_what_is_recorded(hub: Hub, tmp_path: Path) -> None:
    auto = AutoMode("exit", (0.5, 1.0), 0.02, "cpu", 1.25, 0.9, "a <CPU>", {})
    manifest = replace(make_manifest(), calibration=CALIBRATION, tuning=TUNING, auto=auto)
    text = card(hub, write(tmp_path / "made", manifest=manifest)).text
    assert tables(text) == [
        [
            [
                "at most, of both",
                "changed tokens",
                "change of perplexity",
                "layers of 3",
                "operations saved",
                "thresholds",
            ],
            ["2.0 %", "1.2 % ± 0.2 %", "+1.2 ± 0.4 %", "2.2", "20.0 %", "0.750, off"],
        ],
        [
            ["mode", "speed", "text"],
            ["exit (auto)", "1.25x", "at most 2 % changed tokens"],
            ["lossless", "0.90x", "the full model's tokens"],
        ],
        [
            ["checkpoint", "threshold", *EXIT_COLUMNS],
            *([f"after {n} layers", "0.850", "50.0 %", "25.0 %", "-", "12.5 %", "3.0 %"] for n in (1, 2)),
        ],
    ]
    assert "(1,234 tokens)" in text
    assert "with probability 0.9 at most 5.0 % changed tokens on such text" in text
    assert "over full depth, on a &lt;CPU&gt;;" in text


def test_a_guarantee_is_of_the_thresholds_in_force(hub: Hub, tmp_path: Path) -> None:
    manifest = replace(make_manifest(), tuning=TUNING | {"thresholds": [0.25, 1.0]})
    text = card(hub, write(tmp_path / "made", manifest=manifest)).text
    assert "certified" not in text
    assert [line for line in text.splitlines() if line.startswith("## ")] == ["## Run it", "## Report"]


def test_its_commands_are_commands(hub: Hub, tmp_path: Path) -> None:
    text = card(hub, write(tmp_path / "made"), "--revision", "main").text
    (block,) = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    words = [shlex.split(line) for line in block.splitlines()]
    assert [line[:2] for line in words] == [["pip", "install"], ["tide-export", "pull"], ["tide-export", "generate"]]
    pulled = build_parser().parse_args(words[1][1:])
    assert (pulled.repo, pulled.revision, pulled.folder) == ("me/demo", "main", None)
    assert build_parser().parse_args(words[2][1:]).bundle == "demo"


def test_the_demo_s_card_runs_and_holds_its_report(
    hub: Hub, demo_bundle: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    text = card(hub, demo_bundle).text
    (lead,) = re.findall(r'<p class="lead">(.*?)</p>', (demo_bundle / "report.html").read_text())
    assert " ".join(html.unescape(lead).split()) in text
    assert "![what the exits gain](report.png)" in text
    assert [len(rows) for rows in tables(text)] == [6, 4]  # five shares of tokens, three checkpoints
    monkeypatch.chdir(tmp_path)
    assert main(["pull", "-q", "me/demo"]) == 0
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    capsys.readouterr()
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out
