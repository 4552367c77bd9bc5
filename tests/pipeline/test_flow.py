"""The pipeline as a whole: what it refuses, what it leaves behind, and that its last gate closes on a wrong graph."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from families import build

from tide_export.bundle.auto_mode import sentence
from tide_export.bundle.inspect import describe, render
from tide_export.bundle.opened import open_bundle
from tide_export.calibration.config import TideConfig
from tide_export.errors import BundleError, ConfigError, GraphError, ModelError, RouterFileError, UnsupportedModelError
from tide_export.model.source import load_model
from tide_export.pipeline import flow as pipeline
from tide_export.pipeline.calibrate import calibrate
from tide_export.routers.random_routers import random_routers
from tide_export.routers.router import Router
from tide_export.routers.router_set import RouterSet
from tide_export.runtime.engine import load
from tide_export.verify.oracle import oracle
from tide_export.verify.parity import check_exit, check_full

CONFIG = TideConfig(checkpoints=(3, 6, 9), min_layers=3)


@pytest.fixture(scope="module")
def routers(demo_source, demo_text_ids, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("routers") / "routers.safetensors"
    random_routers(demo_source, (3, 6, 9), demo_text_ids[:64]).save(path)
    return path


def test_nothing_is_loaded_for_an_output_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(pipeline, "load_model", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(BundleError, match="out"):
        pipeline.export("anything", tmp_path / "out", config=CONFIG)


def test_the_flow_fits_on_a_page() -> None:
    assert len(Path(pipeline.__file__).read_text().splitlines()) < 100


def test_weights_of_another_precision_are_refused(tmp_path: Path, small_model: Path) -> None:
    with pytest.raises(ConfigError, match="int2"):
        pipeline.export(str(small_model), tmp_path / "out", weights="int2")


@pytest.mark.parametrize("max_length", [1, 1025])
def test_a_length_beyond_the_context_is_refused(
    tmp_path: Path, small_model: Path, routers: Path, max_length: int
) -> None:
    with pytest.raises(ConfigError, match=r"2\.\.1024"):
        pipeline.export(str(small_model), tmp_path / "out", routers=routers, config=CONFIG, max_length=max_length)
    assert not list(tmp_path.iterdir()) or all(entry.name.endswith(".lock") for entry in tmp_path.iterdir())


def test_two_exports_are_equal_files(tmp_path: Path, small_model: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    config = TideConfig(checkpoints="none")
    for folder in folders:
        pipeline.export(str(small_model), folder, config=config, max_length=64, targets=("onnxruntime", "cuda"))
    one, other = ({p.relative_to(f): p.read_bytes() for p in f.rglob("*.onnx*")} for f in folders)
    assert len(one) > 3
    assert one == other


def test_an_architecture_that_cannot_be_traced_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    source = build("deepseek_v4")
    source.model.save_pretrained(tmp_path / "model")
    random = RouterSet({2: Router(source.normalized_size, 4).requires_grad_(False)})
    random.save(tmp_path / "routers.safetensors")
    with pytest.raises(UnsupportedModelError, match="DeepseekV4ForCausalLM"):
        pipeline.export(
            str(tmp_path / "model"),
            tmp_path / "out",
            routers=tmp_path / "routers.safetensors",
            max_length=64,
            config=CONFIG,
        )
    assert not (tmp_path / "out").exists()


def test_nan_in_a_weight_is_named(tmp_path: Path, demo_source, routers: Path) -> None:
    import copy

    model = copy.deepcopy(demo_source.model)
    with torch.no_grad():
        model.model.layers[5].mlp.up_proj.weight[3, 4] = float("nan")
    model.save_pretrained(tmp_path / "broken")
    with pytest.raises(ModelError, match=r"layers\.5\.mlp\.up_proj\.weight holds NaN"):
        pipeline.export(str(tmp_path / "broken"), tmp_path / "out", routers=routers, config=CONFIG)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: RouterSet({14: Router(32, 4)}), "deeper model"),
        (lambda: RouterSet({3: Router(64, 4)}), "hidden size 64"),
        (lambda: RouterSet({3: Router(32, 4)}, {"weights_sha256": "0" * 64}), "calibrate again"),
    ],
)
def test_routers_of_another_model_are_refused(tmp_path: Path, small_model: Path, made, says: str) -> None:
    made().save(tmp_path / "r.safetensors")
    with pytest.raises(RouterFileError, match=says):
        pipeline.export(str(small_model), tmp_path / "out", routers=tmp_path / "r.safetensors", config=CONFIG)
    assert not (tmp_path / "out").exists()


def test_a_graph_that_differs_from_the_model_is_not_put_in_place(
    tmp_path: Path, demo_model: Path, routers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = pipeline.compose

    def wrong(*args):
        model = real(*args)
        norm = next(v for n, v in model.graph.initializers.items() if n.endswith("layers.7.input_layernorm.weight"))
        import onnx_ir as ir

        norm.const_value = ir.tensor(norm.const_value.numpy() * np.float32(1.5), name=norm.name)
        return model

    monkeypatch.setattr(pipeline, "compose", wrong)
    with pytest.raises(GraphError, match="does not equal the model"):
        pipeline.export(str(demo_model), tmp_path / "out", routers=routers, config=CONFIG)
    assert not (tmp_path / "out").exists()


def test_an_export_without_checkpoints_calibrates_nothing(
    tmp_path: Path, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "calibrate_for_bundle", lambda *_: pytest.fail("routers were calibrated"))
    config = TideConfig(checkpoints="none")
    engine = load(pipeline.export(str(small_model), tmp_path / "out", config=config), provider="cpu", threads=1)
    prompt, source = [5, 9, 5, 9, 5], load_model(str(small_model))
    full = check_full(engine, source, [prompt], 12)
    assert full.holds, full.differences
    options = {"temperature": 0.8, "seed": 3, "max_new_tokens": 12, "stop_token_ids": []}
    drafted = engine.generate(prompt, mode="lossless", prompt_lookup=4, **options)
    assert drafted.tokens == engine.generate(prompt, mode="full", **options).tokens
    assert "no checkpoints, so no token exits" in sentence(engine.manifest.auto)
    assert "exits      none: the bundle has no checkpoints" in render(describe(tmp_path / "out"))


def test_no_checkpoints_and_routers_are_refused(tmp_path: Path, small_model: Path, routers: Path) -> None:
    config = TideConfig(checkpoints="none")
    with pytest.raises(ConfigError, match="routers are for checkpoints, and --checkpoints is none"):
        pipeline.export(str(small_model), tmp_path / "out", routers=routers, config=config)
    with pytest.raises(ConfigError, match="--checkpoints none is for export alone"):
        calibrate(str(small_model), tmp_path / "routers.safetensors", config)


def test_tides_own_router_file_exports_and_follows_the_oracle(tmp_path: Path, demo_model: Path, demo_text_ids) -> None:
    """TIDE's routers read neither a shortlist nor have they a bias; where they stand is what is exported."""
    source = load_model(str(demo_model))
    spread = random_routers(source, (3, 6, 9), demo_text_ids[:64], shortlist=0)
    for router in spread.routers.values():
        router.up.bias.zero_()
    layers = {c - 1: {"down.weight": r.down.weight, "up.weight": r.up.weight} for c, r in spread.routers.items()}
    torch.save({"hidden_dim": 128, "bottleneck_dim": 64, "router_layers": layers}, tmp_path / "router.pt")
    elsewhere = TideConfig(checkpoints=(4, 8), min_layers=3)
    bundle = pipeline.export(str(demo_model), tmp_path / "out", routers=tmp_path / "router.pt", config=elsewhere)
    manifest = open_bundle(bundle).manifest
    assert manifest.checkpoints == (3, 6, 9)
    assert manifest.calibration is None
    thresholds = oracle(source, spread, demo_text_ids[:90], [1.0] * 3).scores.quantile(0.6, dim=0).tolist()
    check = check_exit(load(bundle), source, spread, [demo_text_ids[:50]], 40, thresholds)
    assert check.holds, check.differences
    assert set(check.exits) == {3, 6, 9, 12}


def test_an_export_killed_in_the_middle_leaves_the_old_bundle_and_no_half_of_a_new_one(
    tmp_path: Path, demo_bundle: Path, demo_model: Path, routers: Path
) -> None:
    import shutil

    target = tmp_path / "out"
    shutil.copytree(demo_bundle, target)
    before = (target / "tide.json").read_bytes()
    code = (
        "from tide_export.pipeline import flow; from tide_export.calibration.config import TideConfig;"
        f"flow.export({str(demo_model)!r}, {str(target)!r}, routers={str(routers)!r}, "
        "config=TideConfig(checkpoints=(3, 6, 9)), overwrite=True)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while not any(entry.is_dir() and entry != target for entry in tmp_path.iterdir()):
            assert process.poll() is None, "the export ended before it wrote anything"
            assert time.monotonic() < deadline
            time.sleep(0.05)
        # In the middle: the temporary folder exists, the bundle is not yet in place. A second export fails at once.
        with pytest.raises(BundleError, match="another export"):
            pipeline.export(str(demo_model), target, routers=routers, config=CONFIG, overwrite=True)
        os.kill(process.pid, signal.SIGKILL)
    assert (target / "tide.json").read_bytes() == before
    open_bundle(target)
