"""`bench`: the modes, what each of them runs, and where the prompt comes from. No test looks at a time."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tide_export.bundle.file_names import TOKENIZER_FILE
from tide_export.bundle.opened import open_bundle
from tide_export.bundle.store import write_manifest
from tide_export.cli.main import main
from tide_export.errors import ConfigError, GenerationError
from tide_export.runtime.bench import bench
from tide_export.thresholds.resolve import NEVER_EXIT

SHORT = {"prompt_tokens": 5, "new_tokens": 7, "repeat": 2, "threads": 1}


def modes(report) -> dict:
    return {mode["name"]: mode for mode in report.as_dict()["modes"]}


def test_each_mode_runs_what_it_should(demo_bundle: Path):
    found = modes(bench(demo_bundle, **SHORT))
    assert list(found) == ["full", "exit", "lossless", "first"]
    assert found["full"]["layers_per_token"] == 12
    assert found["full"]["exits_per_layer"] == {"12": 7}
    assert found["first"]["layers_per_token"] == 3
    assert found["first"]["exits_per_layer"] == {"3": 7}
    assert 3 <= found["exit"]["layers_per_token"] <= 12
    assert found["full"]["decode_speedup"] == found["full"]["prefill_speedup"] == 1.0
    for mode in found.values():
        assert mode["decode_ms_per_token"] > 0
        assert mode["decode_speedup"] == pytest.approx(
            found["full"]["decode_ms_per_token"] / mode["decode_ms_per_token"]
        )


def test_a_draft_from_text_is_no_exit(demo_bundle: Path):
    report = bench(demo_bundle, **SHORT | {"new_tokens": 40})
    lossless = modes(report)["lossless"]["exits_per_layer"]
    assert lossless["0"] > 0, "tokens of drafts from text have no layer"
    (line,) = [line for line in report.render().splitlines() if line.lstrip("| ").startswith("lossless")]
    exited = sum(count for layers, count in lossless.items() if layers not in ("0", "12"))
    assert line.split()[-2:] == f"{100 * exited / 40:.1f} %".split()


def test_the_thresholds_asked_for_are_used(demo_bundle: Path):
    found = modes(bench(demo_bundle, threshold=[1.0, 0.0, 0.5], min_layers=0, max_pending=0, **SHORT))
    assert found["exit"]["thresholds"] == [NEVER_EXIT, 0.0, 0.5]
    assert found["exit"]["exits_per_layer"] == {"6": 7}
    assert found["exit"]["layers_per_token"] == 12, "with no token allowed to wait nothing is saved"


def test_a_bundle_without_a_tokenizer_is_run_on_random_ids_and_says_so(demo_bundle: Path, tmp_path: Path):
    copy = Path(shutil.copytree(demo_bundle, tmp_path / "copy"))
    manifest = open_bundle(copy).manifest
    (copy / TOKENIZER_FILE).unlink()
    write_manifest(copy, replace(manifest, files={}))
    report = bench(copy, **SHORT)
    assert "random ids, seed 0" in report.render()


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"new_tokens": 0}, ConfigError, "new_tokens"),
        ({"repeat": 0}, ConfigError, "repeat"),
        ({"prompt_tokens": 1000, "new_tokens": 100}, ConfigError, "context"),
        ({"max_pending": -1}, GenerationError, "max_pending"),
        ({"threshold": 2.0}, GenerationError, r"\[0, 1\]"),
        ({"threshold": [0.5, 0.5]}, GenerationError, "3 checkpoints"),
        ({"prompt": ""}, GenerationError, "empty"),
    ],
)
def test_bad_requests_are_refused(demo_bundle: Path, options, error, says):
    with pytest.raises(error, match=says):
        bench(demo_bundle, **options)


def test_the_command_prints_table_or_json(demo_bundle: Path, capsys):
    short = ["--prompt-tokens", "3", "--new-tokens", "2", "--repeat", "1", "--prompt", "import os"]
    assert main(["bench", str(demo_bundle), *short]) == 0
    assert "ms/token" in capsys.readouterr().out
    assert main(["bench", str(demo_bundle), *short, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["prompt"] == "the given text, repeated"
    assert (answer["prompt_tokens"], answer["new_tokens"], answer["repeat"]) == (3, 2, 1)
