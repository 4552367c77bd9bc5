"""K/V in int8: graphs against the oracle on rounded keys and values, alone and in batches, and the command line."""

import json
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
import pytest
import tiers
import torch
from families import build
from tiny_configs import CHECKPOINTS, LAYERS
from tiny_engines import engine_of, pieces_of

from tide_export.bundle.file_names import GRAPH_FILE
from tide_export.bundle.manifest import INT8_KV, SCALE_BYTES, Manifest, Quantization
from tide_export.bundle.opened import open_bundle
from tide_export.calibration.config import TideConfig
from tide_export.cli.main import main
from tide_export.errors import BundleError, ConfigError, UnsupportedModelError
from tide_export.lower.onnxruntime.layers import inline_layers
from tide_export.names.operators import OP_PAGED_ATTENTION
from tide_export.pipeline.request import ExportRequest
from tide_export.quantize.flow import quantize_model
from tide_export.routers.random_routers import random_routers
from tide_export.runtime.engine import load
from tide_export.runtime.scheduler import SchedulerLimits
from tide_export.verify.export_gate import dividing_thresholds
from tide_export.verify.int8_kv import rounded_kv
from tide_export.verify.parity import TOLERANCES, check_exit, check_full, check_lossless
from tide_export.verify.quantized import float32_engine

BLOCK_TOKENS = 16  # of the prefix cache
PROMPTS = [[7], [5, 9], [(i * 37) % 500 + 3 for i in range(40)]]
NEW_TOKENS = 16


# Rotation inside, windows and shared K/V; further families were run by hand.
@pytest.mark.parametrize(
    ("family", "bits"), tiers.exhaustive_beyond(3, [("llama", 32), ("gemma3n (text)", 32), ("llama", 4), ("llama", 8)])
)
def test_a_graph_equals_the_model_on_rounded_keys(family: str, bits: int, tmp_path: Path) -> None:
    source = build(family)
    if bits < 32:
        quantize_model(source, Quantization("rtn", bits, 32, symmetric=True, accuracy_level=4))
    pieces = pieces_of(source, CHECKPOINTS)
    routers = random_routers(source, CHECKPOINTS, PROMPTS[2], bottleneck=16)
    deployed = engine_of(source, routers, tmp_path / "bundle", pieces, kv_cache=INT8_KV)
    assert deployed.manifest.weights == ("fp32" if bits == 32 else f"int{bits}")
    bundle = deployed.bundle
    engine = deployed if bits == 32 else float32_engine(bundle, 1)
    graph = ir.load(tmp_path / "bundle" / GRAPH_FILE)
    inline_layers(graph)
    nodes = list(graph.graph.all_nodes())
    attentions = [node.op_type for node in nodes if node.op_type in OP_PAGED_ATTENTION.values()]
    assert attentions == [OP_PAGED_ATTENTION[INT8_KV]] * LAYERS
    middle, tolerance = dividing_thresholds(source, routers, PROMPTS[2]), TOLERANCES["int8 K/V"]
    exact = check_full(engine, source, PROMPTS[2:], NEW_TOKENS)
    with rounded_kv(source, engine.manifest):
        full = check_full(engine, source, PROMPTS, NEW_TOKENS, tolerance=tolerance)
        exits = check_exit(engine, source, routers, PROMPTS, NEW_TOKENS, middle, 4, tolerance=tolerance)
        lossless = check_lossless(engine, source, PROMPTS, NEW_TOKENS, 0.3, tolerance=tolerance)
    for check in (full, exits, lossless):
        assert check.holds, check.differences
    assert full.max_error < exact.max_error / 2  # than the model that does not round
    assert lossless.drafted > 0
    assert [one.tokens for one in lossless.generated] == [one.tokens for one in full.generated]
    for mode in ("full", "exit", "lossless"):
        options = {} if mode == "full" else {"threshold": middle}
        options |= {"max_new_tokens": NEW_TOKENS, "mode": mode, "stop_token_ids": []}
        alone = [deployed.generate(prompt, **options).tokens for prompt in PROMPTS]
        assert [one.tokens for one in deployed.generate(PROMPTS, **options)] == alone


def test_export_validate_and_inspect(demo_model: Path, demo_bundle: Path, tmp_path: Path, capsys) -> None:
    model, bundle = str(demo_model), str(tmp_path / "bundle")
    options = ["--routers", str(demo_bundle / "routers.safetensors"), "--kv-cache", "int8", "--epsilon", "0", "-q"]
    assert main(["export", model, "-o", bundle, *options]) == 0
    manifest = open_bundle(bundle).manifest
    assert manifest.kv_cache == json.loads((tmp_path / "bundle" / "tide.json").read_text())["kv_cache"] == "int8"
    assert {tensor.dtype for tensor in manifest.inputs if tensor.name.startswith("pages")} == {"int8"}
    capsys.readouterr()
    assert main(["inspect", bundle]) == 0
    assert "of K/V in int8 per token" in capsys.readouterr().out
    assert main(["inspect", bundle, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["kv_cache"], told["kv_bytes_per_token"]) == ("int8", 12 * 2 * 2 * (32 + SCALE_BYTES))
    numbers = ["--prompts", "3", "--longest-prompt", "24", "--new-tokens", "6", "--threshold", "0.5", "-q"]
    assert main(["validate", bundle, "--model", model, *numbers]) == 0
    said = capsys.readouterr().out
    assert "both with K/V rounded to int8" in said
    assert "HOLDS" in said


def test_what_cannot_hold_int8_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache int8 is for target onnxruntime alone, not for tensorrt"):
        ExportRequest("model", "bundle", config=TideConfig(kv_cache="int8"), targets=("tensorrt",), engines=False)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with K/V in int8."""
    source, folder = build("llama"), tmp_path_factory.mktemp("int8") / "bundle"
    routers = random_routers(source, CHECKPOINTS, PROMPTS[2], bottleneck=16)
    engine_of(source, routers, folder, pieces_of(source, CHECKPOINTS), kv_cache=INT8_KV)
    return folder


def test_the_prefix_cache_holds_int8(bundle: Path) -> None:
    engine = load(bundle, threads=1)
    block = BLOCK_TOKENS * engine.manifest.kv_token_bytes
    scheduler = engine.scheduler(SchedulerLimits(slots=2, prefix_cache_bytes=2 * block))
    answers = []
    for cached in (0, 2):
        handle = scheduler.submit(PROMPTS[2], mode="full", max_new_tokens=NEW_TOKENS, stop_token_ids=[])
        answers.append(handle.result().tokens)
        assert (handle.cached_tokens, scheduler.prefix_cache_bytes) == (cached * BLOCK_TOKENS, 2 * block)
    assert answers[0] == answers[1]


def test_a_manifest_with_another_type_is_refused(bundle: Path) -> None:
    manifest = open_bundle(bundle).manifest
    assert Manifest.from_json(manifest.to_json()) == manifest
    with pytest.raises(BundleError, match="field 'kv_cache' must be one of"):
        Manifest.from_json(replace(manifest, kv_cache="int4").to_json())


def test_a_model_that_keeps_its_keys_to_itself_has_no_reference(bundle: Path) -> None:
    source, manifest = build("llama"), open_bundle(bundle).manifest
    model = source.model
    model.forward = lambda input_ids, **_: model.lm_head(model.get_input_embeddings()(input_ids))
    message = "does not give its keys and values to transformers' cache"
    with pytest.raises(UnsupportedModelError, match=message), rounded_kv(source, manifest):
        model(torch.tensor([[1, 2]]))


def test_latent_keys_and_values_have_no_reference(bundle: Path) -> None:
    source, manifest = build("deepseek_v3"), open_bundle(bundle).manifest
    manifest = replace(manifest, model=replace(manifest.model, kv_shapes=((4, 24),) * LAYERS))
    message = "does not give its keys and values to transformers' cache"
    with pytest.raises(UnsupportedModelError, match=message), rounded_kv(source, manifest):
        source.model(torch.tensor([[1, 2]]))
