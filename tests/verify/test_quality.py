"""`validate --quality`: the graph's predictions along a text are those of TIDE's rule in PyTorch."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiers
import torch

from tide_export.bundle.auto_mode import AutoMode
from tide_export.bundle.file_names import ROUTERS_FILE
from tide_export.bundle.opened import open_bundle
from tide_export.bundle.store import replace_manifest
from tide_export.cli.main import main
from tide_export.common.changed_tokens import Change, added_loss, changed_tokens
from tide_export.data.sequences import load_tokenizer
from tide_export.errors import ConfigError, DatasetError
from tide_export.model.source import load_model
from tide_export.routers.router_set import RouterSet
from tide_export.runtime.engine import load
from tide_export.verify.oracle import oracle
from tide_export.verify.quality import measure_quality, quality_texts
from tide_export.verify.validate import validate

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "demo" / "demo-llama")
TEXT = str(ROOT / "tide_export" / "*.py")


@pytest.fixture(scope="module")
def texts(demo_bundle: Path) -> list[list[int]]:
    return quality_texts(open_bundle(demo_bundle).manifest, load_tokenizer(MODEL), TEXT, 300)


@pytest.mark.parametrize(("limit", "temperature"), tiers.exhaustive_beyond(2, [(16, 0.8), (16, 0.0), (0, 0.8)]))
def test_equals_the_rule_in_pytorch(demo_bundle: Path, texts: list[list[int]], limit: int, temperature: float):
    source, routers = load_model(MODEL), RouterSet.load(demo_bundle / ROUTERS_FILE)
    settings = [("0.3", [0.3] * 3), ("0.7", [0.7] * 3), ("first", [-1.0, 2.0, 2.0])]
    measured = measure_quality(load(demo_bundle), settings, texts, limit, temperature)
    assert [one.name for one in measured] == ["full", "0.3", "0.7", "first"]
    assert [one.tokens for one in measured] == [sum(len(ids) - 1 for ids in texts)] * 4
    for one, thresholds in zip(measured, [[2.0] * 3, *(setting[1] for setting in settings)], strict=True):
        rule = [oracle(source, routers, ids[:-1], thresholds) for ids in texts]
        nll, both, layers = [], [], []
        for ids, read in zip(texts, rule, strict=True):
            nll.append(torch.nn.functional.cross_entropy(read.logits, torch.tensor(ids[1:]), reduction="none"))
            both.append((read.full_logits.numpy(), read.logits.numpy()))
            layers.append(read.exit_layers.float())
        assert one.perplexity == pytest.approx(float(torch.cat(nll).double().mean().exp()), rel=1e-4)
        changed, added = (
            np.concatenate([measure(*pair, temperature) for pair in both]) for measure in (changed_tokens, added_loss)
        )
        assert one.change.changed == pytest.approx(changed.mean(), abs=1e-4 if temperature else 1e-9)
        assert one.change.perplexity == pytest.approx(np.expm1(added.mean()), abs=1e-4)
        assert one.layers == pytest.approx(float(torch.cat(layers).mean()), abs=1e-4)
    assert measured[0].change == Change(measured[0].tokens, temperature, *[pytest.approx(0, abs=1e-5)] * 4)
    assert measured[1].layers < measured[2].layers < measured[0].layers
    assert measured[1].change.changed > measured[2].change.changed > 0
    assert measured[1].change.perplexity_error > 0


def test_changed_tokens_are_those_that_the_runtime_changes_along_full_depths_own_text(demo_bundle: Path):
    """With the same seed in `full` and in `exit`, by the runtime's own sampler at every position."""
    engine, thresholds, prompt, changed, expected = load(demo_bundle), [0.4, 0.5, 0.6], [5, 6, 7, 8], 0, []
    for seed in range(tiers.sized(8, 24)):
        options = {"temperature": 0.8, "seed": seed, "stop_token_ids": ()}
        full = [*prompt, *engine.generate(prompt, mode="full", max_new_tokens=40, **options).tokens]
        states = [engine.start(one, 2**62) for one in (thresholds, [2.0] * 3)]
        for end in range(len(prompt), len(full)):
            one = engine.generate(full[:end], mode="exit", threshold=thresholds, max_new_tokens=1, **options)
            changed += one.tokens != [full[end]]
            mode, whole = (state.step(full[state.length : end]).logits[None] for state in states)
            expected.append(float(changed_tokens(whole, mode, 0.8)[0]))
    spread = np.sqrt(sum(p * (1 - p) for p in expected))
    assert 0.02 < np.mean(expected) < 0.7
    assert abs(changed - sum(expected)) < 4.5 * spread


def test_texts_are_of_several_documents_and_as_long_as_asked(demo_bundle: Path, texts: list[list[int]]):
    assert len(texts) == 2
    assert sum(map(len, texts)) == 300
    manifest = open_bundle(demo_bundle).manifest
    assert [len(ids) for ids in quality_texts(manifest, load_tokenizer(MODEL), TEXT, 2)] == [2]


def test_documents_that_the_routers_saw_are_omitted(demo_bundle: Path, tmp_path: Path):
    manifest, tokenizer = open_bundle(demo_bundle).manifest, load_tokenizer(MODEL)
    calibrated_on = ROOT / "calibration" / "text" / "python-stdlib.jsonl"
    seen = tmp_path / "seen.jsonl"
    lines = calibrated_on.read_text().splitlines()
    seen.write_text("\n".join(lines[:5]))
    with pytest.raises(DatasetError, match="holds only documents that the routers were fitted on"):
        quality_texts(manifest, tokenizer, str(seen), 100)
    seen.write_text("\n".join([*lines[:5], json.dumps({"text": "x = 1\n" * 40})]))
    (ids,) = quality_texts(manifest, tokenizer, str(seen), 100)
    assert tokenizer.decode(ids).startswith("x = 1\nx = 1")


def test_the_command_prints_a_table(demo_bundle: Path, tmp_path: Path, capsys):
    words = ["validate", str(demo_bundle), "--model", MODEL, "--dataset", TEXT, "--prompts", "1", "-q"]
    words += ["--longest-prompt", "4", "--new-tokens", "2", "--provider", "cpu", "--threshold", "0.5"]
    assert main([*words, "--quality", "64"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    header = next(number for number, row in enumerate(rows) if row[:2] == ["quality", "tokens"])
    assert [row[0] for row in rows[header + 2 : header + 5]] == ["full", "0.5", "bundle"]
    auto = AutoMode("exit", (0.4, 0.5, 0.6), 0.02, "cpu", 1.2, None, "this one", {})
    shutil.copytree(demo_bundle, tmp_path / "b")
    bundle = open_bundle(tmp_path / "b", verify=False)
    replace_manifest(bundle, replace(bundle.manifest, auto=auto))
    words[1] = str(tmp_path / "b")
    assert main([*words, "--quality", "64", "--json"]) == 0
    quality = json.loads(capsys.readouterr().out)["quality"]
    assert [one["name"] for one in quality] == ["full", "0.5", "bundle", "auto"]
    assert quality[0]["layers"] == 12 > quality[1]["layers"]
    assert (quality[0]["changed"], quality[1]["temperature"]) == (pytest.approx(0, abs=1e-6), 0.8)
    assert main([*words, "--quality", "64", "--temperature", "0", "--json"]) == 0
    greedy = json.loads(capsys.readouterr().out)["quality"]
    assert (greedy[0]["changed"], greedy[1]["temperature"]) == (0, 0)


def test_one_token_is_too_few(demo_bundle: Path):
    with pytest.raises(ConfigError, match="quality must be a whole number, 2 or more, not 1"):
        validate(demo_bundle, MODEL, TEXT, quality=1)
    with pytest.raises(ConfigError, match="temperature must be a finite number, 0 or more, not -1"):
        validate(demo_bundle, MODEL, TEXT, quality=64, temperature=-1)
