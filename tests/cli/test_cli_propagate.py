"""`--kv-cache-strategy propagate` from the command line: exported, validated against its own rule, run, and refused
where it would not be what is asked for."""

import json
from pathlib import Path

import pytest
from command_line import refused

import tide_export
from tide_export.bundle.opened import open_bundle
from tide_export.cli.main import main
from tide_export.errors import GenerationError, TuneError
from tide_export.tuning.tune import tune

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "calibration" / "text" / "python-stdlib-validation.jsonl"
OPTIONS = ["--kv-cache-strategy", "propagate", "-q"]


def test_it_says_what_the_rule_says(capsys, propagating_bundle: Path, demo_model: Path) -> None:
    options = ["--dataset", str(TEXT), "--prompts", "4", "--longest-prompt", "24", "--new-tokens", "16"]
    assert (
        main(
            [
                "validate",
                str(propagating_bundle),
                "--model",
                str(demo_model),
                *options,
                "--threshold",
                "0.3,0.7",
                "--json",
            ]
        )
        == 0
    )
    said = json.loads(capsys.readouterr().out)
    assert said["holds"] is True
    assert sum(check["exits_per_layer"].get("3", 0) for check in said["checks"]) > 0


def test_nothing_waits_and_what_is_skipped_is_never_computed(
    propagating_bundle: Path, demo_text_ids: list[int]
) -> None:
    engine = tide_export.load(propagating_bundle, threads=1)
    stats = engine.generate(demo_text_ids[:20], max_new_tokens=24, threshold=0.0, stop_token_ids=[]).stats
    assert stats.exits_per_layer == {3: 23, 6: 0, 9: 0}  # the first token is the prompt's, which runs every layer
    assert stats.layers_run == [12, *[3] * 23]
    assert stats.layer_tokens_run == 20 * 12 + 23 * 3
    assert stats.layer_tokens_total == 43 * 12
    state = engine.start([0.0] * 3)
    state.step(demo_text_ids[:5])
    state.step(demo_text_ids[5:6])
    assert state.pending == [0, 0, 0]


def test_several_prompts(capsys, propagating_bundle: Path) -> None:
    line = ["generate", str(propagating_bundle), "--max-new-tokens", "8", "--threshold", "0.4", "--json", "-q"]
    prompts = ["def read(", "import numpy as np\n\nclass "]
    alone = []
    for prompt in prompts:
        assert main([*line, "--prompt", prompt]) == 0
        alone.append(json.loads(capsys.readouterr().out)["tokens"])
    two = [*line, "--prompt", prompts[0], "--prompt", prompts[1]]
    assert main(two) == 0
    assert [one["tokens"] for one in json.loads(capsys.readouterr().out)["sequences"]] == alone
    assert main([*two, "--compaction-threshold", "1"]) == 2
    assert "compaction_threshold is for an exact K/V cache" in capsys.readouterr().err


def test_how_many_may_wait_is_no_question(capsys, propagating_bundle: Path, demo_model: Path, tmp_path: Path) -> None:
    """In every command: nothing waits, so the option would be ignored."""
    bundle, pending = str(propagating_bundle), ["--max-pending", "4"]
    two = ["--prompt", "def f(", "--prompt", "def g("]
    for line in (
        ["generate", bundle, *two[:2]],
        ["generate", bundle, *two],
        ["bench", bundle],
        ["validate", bundle, "--model", str(demo_model), "--dataset", str(TEXT)],
    ):
        assert main([*line, *pending, "-q"]) == 2
        said = capsys.readouterr().err
        assert f"max_pending is for an exact K/V cache: bundle {bundle} propagates, so that nothing waits" in said, line
    for option in ("--max-pending", "--compaction-threshold"):
        assert main(["export", str(demo_model), "-o", str(tmp_path / "b"), option, "1", *OPTIONS]) == 2
        name = option.removeprefix("--").replace("-", "_")
        assert f"{name} is for kv_cache_strategy exact: where K/V are propagated nothing" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_inspect_says_so(capsys, propagating_bundle: Path) -> None:
    assert main(["inspect", str(propagating_bundle)]) == 0
    assert "K/V of skipped layers are computed from the exit state (propagate)" in capsys.readouterr().out
    assert open_bundle(propagating_bundle).manifest.kv_cache_strategy == "propagate"


def test_bench_leaves_out_the_mode_it_has_not(capsys, propagating_bundle: Path) -> None:
    assert (
        main(["bench", str(propagating_bundle), "--prompt-tokens", "4", "--new-tokens", "2", "--repeat", "1", "--json"])
        == 0
    )
    assert [mode["name"] for mode in json.loads(capsys.readouterr().out)["modes"]] == ["full", "exit", "first"]


def test_what_needs_an_exact_cache_is_refused(
    capsys, propagating_bundle: Path, demo_model: Path, tmp_path: Path
) -> None:
    engine = tide_export.load(propagating_bundle, threads=1)
    with pytest.raises(GenerationError, match="mode 'lossless' needs an exact K/V cache"):
        engine.generate([1, 2], mode="lossless")
    state = engine.start([1.0] * 3)
    state.step([1, 2])
    with pytest.raises(GenerationError, match="cannot be rewound"):
        state.rewind(1)
    with pytest.raises(TuneError, match="kv_cache_strategy propagate"):
        tune(propagating_bundle, str(TEXT), mode="lossless")
    assert main(["tune", str(propagating_bundle), "--dataset", str(TEXT), "--epsilon", "0.1", "--delta", "0.1"]) == 2
    assert "tokens depend on earlier exits" in capsys.readouterr().err
    target = ["--target", "tensorrt", "--no-engines"]
    assert main(["export", str(demo_model), "-o", str(tmp_path / "b"), *target, *OPTIONS]) == 2
    assert "kv_cache_strategy propagate is for target onnxruntime, not tensorrt" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
    line = refused(capsys, "export", demo_model, "-o", tmp_path / "b", "--kv-cache-strategy", "some")
    assert "--kv-cache-strategy: invalid choice: 'some'" in line
