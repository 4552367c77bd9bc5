"""MTP layers in the checkpoints of Qwen3-Next and Qwen3.5: found and read, as networks, and in bundles by default."""

from pathlib import Path
from typing import Any

import pytest
import tiers
import torch
from packed_models import FP8, GPTQ, QUANTIZED, fp8, gptq, write
from random_heads import as_tensor, drafts_cost_no_token, eager, exported, network_equals_step, prompt
from random_mtp import CONTEXT, DEPTH, FAMILIES, VOCABULARY, WIDTH, mtp_tensors, published, write_model
from safetensors.torch import load_file, save_file

from tide_export.bundle.opened import open_bundle
from tide_export.bundle.store import write_manifest
from tide_export.calibration.config import TideConfig
from tide_export.drafting.heads.mtp import mtp_weights, read_mtp
from tide_export.errors import DraftError
from tide_export.model.source import SourceModel, load_model
from tide_export.pipeline.flow import export
from tide_export.runtime.engine import load
from tide_export.tuning import drafter_gain
from tide_export.tuning.report import Comparison


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write_model(folder / name.replace(" ", "-"), name) for name in FAMILIES}


@pytest.fixture(scope="module")
def source(models: dict[str, Path]) -> SourceModel:
    return load_model(str(models["qwen3_5"]))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_head_is_what_its_layout_defines(name: str, models: dict[str, Path]) -> None:
    source = load_model(str(models[name]))
    assert set(mtp_weights(source)) == set(mtp_tensors(FAMILIES[name].sparse, FAMILIES[name].stacked))
    head = read_mtp(source)
    ids = torch.tensor([prompt(VOCABULARY, 30)])
    with torch.no_grad():
        states = source.normalize(source.run(ids[:, :-1], [DEPTH]).raw[DEPTH])
        embeddings = source.model.get_input_embeddings()(ids[:, 1:])
        logits, following = head.step(embeddings, states, torch.arange(29)[None])
        expected, next_states = published(name, source, embeddings[0], states[0])
    torch.testing.assert_close(logits[0], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(following[0], next_states, rtol=1e-4, atol=1e-4)
    assert (head.kind, head.layers, head.fc) == ("MTP", (), None)


@pytest.mark.parametrize("name", tiers.exhaustive_but(["qwen3_5", "qwen3_5_moe"], FAMILIES))
def test_the_network_is_the_head_with_rounded_weights(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    network_equals_step(read_mtp(load_model(str(models[name]))), tmp_path / "drafter.onnx")


@pytest.mark.parametrize("name", tiers.exhaustive_but(["qwen3_5"], FAMILIES))
def test_drafts_cost_no_token(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    """Also where rejected drafts take recurrent states back."""
    engine = load(exported(models[name], models[name], tmp_path / "made", (1, 2)), provider="cpu", threads=1)
    drafter = engine.manifest.drafter
    assert drafter is not None
    assert (drafter.layers, drafter.token_count, drafter.max_tokens) == ((), VOCABULARY, CONTEXT)
    assert drafter.record == {"layout": "MTP", "head": str(models[name])}
    assert drafts_cost_no_token(engine, drafter=3) > 20


QUANTIZED_CHECKPOINTS = {"gptq": (GPTQ, gptq()), "fp8": (FP8, fp8), "gptq, the layer in 16 bits": (GPTQ, gptq())}


@pytest.mark.parametrize("case", QUANTIZED_CHECKPOINTS)
def test_checkpoints_may_be_quantized(case: str, tmp_path: Path) -> None:
    settings, quantize = QUANTIZED_CHECKPOINTS[case]
    write(tmp_path / "model", FAMILIES["qwen3_5"].config(), settings, quantize)
    stored, meant = mtp_tensors(), mtp_tensors()
    for name in filter(QUANTIZED.search, meant):
        if case in ("gptq", "fp8"):
            parts, numbers = quantize(stored.pop(name).T.numpy())
            stored |= {name.removesuffix("weight") + part: as_tensor(array) for part, array in parts.items()}
            meant[name] = as_tensor(numbers.T)
    file = tmp_path / "model" / "model.safetensors"
    save_file(load_file(file) | stored, file, {"format": "pt"})
    source = load_model(str(tmp_path / "model"), packed=True)
    head = read_mtp(source)
    x, s = torch.randn(2, 20, WIDTH, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        logits, states = head.step(x[None], s[None], torch.arange(20)[None])
        _, next_states = published("qwen3_5", source, x, s, meant)
    torch.testing.assert_close(states[0], next_states, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, source.head(states), rtol=1e-4, atol=1e-4)


# --- by default ------------------------------------------------------------------------------------------------------


def speedup(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    monkeypatch.setattr(drafter_gain, "compare", lambda *_: Comparison(value))


def exported_plainly(model: Path, folder: Path, **options: Any) -> Path:
    return export(str(model), folder, config=TideConfig(checkpoints="none"), weights="fp32", **options)


def test_one_that_pays_is_in_the_bundle(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speedup(monkeypatch, 1.5)
    bundle = exported_plainly(models["qwen3_5"], tmp_path / "bundle")
    manifest = open_bundle(bundle).manifest
    assert manifest.drafter is not None
    assert manifest.drafting is not None
    assert manifest.drafting.tuning["pays"]
    assert manifest.drafting.drafter_cost is None, "measured where it runs"
    write_manifest(bundle, eager(manifest))
    engine = load(bundle, provider="cpu", threads=1)
    assert (engine.auto.mode, engine.auto.lossless_speedup) == ("lossless", 1.5)
    given: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.8, "seed": 3, "stop_token_ids": []}
    full, auto = (engine.generate(prompt(VOCABULARY, 9), mode=mode, **given) for mode in ("full", "auto"))
    assert auto.tokens == full.tokens
    assert auto.stats.learned_drafted > 0


def test_one_that_does_not_pay_is_left_out(
    models: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    speedup(monkeypatch, 1.02)
    bundle = exported_plainly(models["qwen3_5"], tmp_path / "bundle")
    opened = open_bundle(bundle)
    assert (opened.manifest.drafter, opened.manifest.drafting) == (None, None)
    assert "drafter.onnx" not in opened.files
    assert "drafts by the model's MTP layer do not pay here" in caplog.text


def test_it_is_left_out_on_demand(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speedup(monkeypatch, 1.5)
    bundle = exported_plainly(models["qwen3_5"], tmp_path / "bundle", draft_head="none")
    assert open_bundle(bundle).manifest.drafter is None


# --- what is refused -------------------------------------------------------------------------------------------------

NORM = "mtp.layers.0.input_layernorm.weight"
DAMAGED = {
    "a weight that is missing": ({NORM: None}, r"it has no usable weight for layers\.0\.mtp_block\.input_layernorm"),
    "of another size": (
        {NORM: torch.ones(WIDTH // 2)},
        r"weight layers\.0\.mtp_block\.input_layernorm\.weight is \[32\]",
    ),
    "NaN": ({NORM: torch.full((WIDTH,), torch.nan)}, "holds NaN or infinity"),
    "unknown": ({"mtp.layers.0.self_attn.sinks": torch.ones(4)}, r"nothing is known of its weight .*sinks"),
    "an embedding of its own": ({"mtp.embed_tokens.weight": torch.ones(VOCABULARY, WIDTH)}, "an embedding of its own"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_ones_are_refused(case: str, tmp_path: Path) -> None:
    changes, says = DAMAGED[case]
    folder = write_model(tmp_path / "model", "qwen3_5", **changes)
    with pytest.raises(DraftError, match=says) as refused:
        read_mtp(load_model(str(folder)))
    assert repr(str(folder)) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_damaged_one_does_not_stop_an_export(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write_model(tmp_path / "model", "qwen3_5", **{NORM: None})
    bundle = exported_plainly(model, tmp_path / "bundle")
    assert open_bundle(bundle).manifest.drafter is None
    assert "has no usable weight" in caplog.text
    assert "--no-draft-head" in caplog.text


def test_a_model_without_one_has_none(source: SourceModel, tmp_path: Path) -> None:
    bare = dict.fromkeys(mtp_tensors())
    assert mtp_weights(load_model(str(write_model(tmp_path / "bare", "qwen3_5", **bare)))) == {}
    further = {
        name.replace("layers.0", "layers.1"): value for name, value in mtp_tensors().items() if "layers.0" in name
    }
    two = load_model(str(write_model(tmp_path / "two", "qwen3_5", **further)))
    assert set(mtp_weights(two)) == set(mtp_weights(source))
