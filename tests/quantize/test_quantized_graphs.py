"""The oracle is the judge of quantized graphs too: with products in float32 they equal the model they stand for, token
for token and layer for layer; with products of 8-bit inputs they are within that rounding."""

from pathlib import Path

import onnx_ir as ir
import pytest
import tiers
import torch
from families import build
from tiny_configs import CHECKPOINTS, LAYERS
from tiny_engines import engine_of, pieces_of

from tide_export.bundle.manifest import Quantization
from tide_export.bundle.opened import open_bundle
from tide_export.errors import BundleError
from tide_export.lower.onnxruntime.layers import inline_layers
from tide_export.names.operators import OP_GATED_MATMUL, OP_INTEGER_EXPERTS, OP_INTEGER_MATMUL
from tide_export.quantize.flow import quantize_model
from tide_export.routers.random_routers import random_routers
from tide_export.thresholds.resolve import NEVER_EXIT
from tide_export.verify.export_gate import dividing_thresholds
from tide_export.verify.parity import TOLERANCES, check_exit, check_full
from tide_export.verify.quantized import float32_engine, restore

PROMPTS = [[7], [5, 9], [(i * 37) % 500 + 3 for i in range(40)]]
NEW_TOKENS = 24
# One operator for gate and up, a tied head and biases, Conv1D, scaled embeddings (two of them with softcaps), experts;
# every setting at least once.
CASES = {
    "llama": Quantization("rtn", 4, 32, True, 4),
    "llama (3.1)": Quantization("rtn", 4, 32, True, 4),
    "gpt2": Quantization("rtn", 8, 16, True, 4),
    "gemma": Quantization("rtn", 4, 128, False, 4),  # blocks longer than the rows
    "gemma3n (text)": Quantization("rtn", 4, 128, False, 4),
    "qwen3_moe": Quantization("rtn", 4, 32, True, 4),
}


@pytest.mark.parametrize("family", tiers.exhaustive_but(set(CASES) - {"gemma3n (text)"}, CASES))
def test_a_quantized_graph_equals_the_model_it_stands_for(family: str, tmp_path: Path) -> None:
    source = build(family)
    quantize_model(source, CASES[family])
    assert source.quantized is not None
    routers = random_routers(source, CHECKPOINTS, PROMPTS[2], bottleneck=16, lens_rank=8)
    deployed = engine_of(source, routers, tmp_path / "bundle", pieces_of(source, CHECKPOINTS))
    bundle = deployed.bundle
    assert bundle.manifest.quantization == CASES[family]
    assert bundle.manifest.weights == f"int{CASES[family].bits}"
    exact = float32_engine(bundle, 1)

    full = check_full(exact, source, PROMPTS, NEW_TOKENS)
    assert full.holds, full.differences
    assert full.within_tolerance == 0
    assert full.max_error < 1e-4 * full.largest_logit
    middle = dividing_thresholds(source, routers, PROMPTS[2])
    exits: set[int] = set()
    for thresholds in (middle, [middle[0], NEVER_EXIT], [NEVER_EXIT, middle[1]]):
        check = check_exit(exact, source, routers, PROMPTS, NEW_TOKENS, thresholds, 4)
        assert check.holds, check.differences
        exits |= set(check.exits)
    assert exits == {*CHECKPOINTS, LAYERS}

    rounded = check_full(deployed, source, PROMPTS, NEW_TOKENS, tolerance=TOLERANCES["int8 matmuls"])
    assert rounded.holds, (rounded.max_error, rounded.largest_logit, rounded.differences)
    assert rounded.max_error > 10 * full.max_error, "its products are computed like those of the exact one"

    # The bundle's own integers give the reference back, from the weights the model had at first.
    plain = build(family)
    assert 0.001 < restore(plain, bundle) < 0.2
    for name, parameter in plain.model.named_parameters():
        assert torch.equal(parameter, source.model.get_parameter(name)), name
    _check_graph(family, bundle.file("model.onnx").path, source.quantized)
    if family == "llama (3.1)":
        _check_restoring(bundle, source)


def _check_graph(family: str, path: Path, quantized) -> None:
    model = ir.load(path)
    inline_layers(model)
    graph = model.graph
    kinds = [node.op_type for node in graph.all_nodes()]
    symbolic = [weight.name for weight in graph.initializers.values() if weight.name in quantized.blocks]
    assert not symbolic, "a quantized weight is stored in float32 too"
    assert kinds.count("GatherBlockQuantized") == (2 if family == "gemma3n (text)" else 1), "an embedding is float32"
    if family == "llama (3.1)":  # per layer: packed projections, o, gate, up, down; and the head
        assert (kinds.count(OP_INTEGER_MATMUL[4]), kinds.count(OP_INTEGER_MATMUL[8])) == (LAYERS * 5, 1)
        assert "MatMulNBits" not in kinds
        place = {name: (w.const_value.offset, w.const_value.length) for name, w in graph.initializers.items()
                 if isinstance(w.const_value, ir.ExternalTensor)}  # fmt: skip
        tied = "model.embed_tokens.weight"
        assert place[f"{tied}.rows"] == place[f"{tied}.blocks"], "the tied embedding is stored twice"
    if family == "llama":
        assert kinds.count(OP_GATED_MATMUL[OP_INTEGER_MATMUL[4]]) == LAYERS
        assert kinds.count(OP_INTEGER_MATMUL[4]) == LAYERS * 3
    if family == "gpt2":
        assert kinds.count(OP_INTEGER_MATMUL[8]) == LAYERS * 4 + 1
    if family == "qwen3_moe":
        experts = [n for n in graph.all_nodes() if "experts" in n.metadata_props.get("tide.weights", "")]
        assert {node.op_type for node in experts} == {OP_INTEGER_EXPERTS[OP_INTEGER_MATMUL[4]]}
        assert len(experts) == 2 * sum(name.endswith(".experts.gate_up_proj.0") for name in quantized.blocks)


def _check_restoring(bundle, source) -> None:
    """Another model is refused, and integers that were changed change the reference."""
    with pytest.raises(BundleError, match=r"a quantized matrix .* that gpt2 has not"):
        restore(build("gpt2"), bundle)
    name = "model.layers.1.mlp.up_proj.weight"
    stored = ir.load(bundle.file("model.onnx").path).graph.initializers[f"{name}.blocks"].const_value
    assert isinstance(stored, ir.ExternalTensor)
    weights = bundle.path / "model.onnx.data"
    content = bytearray(weights.read_bytes())
    content[stored.offset] ^= 0xFF
    weights.write_bytes(content)
    changed = build("llama (3.1)")
    restore(changed, open_bundle(bundle.path, verify=False))
    differs = changed.model.get_parameter(name) != source.model.get_parameter(name)
    assert differs.sum() == 2, "two integers of 4 bits are in a byte"
