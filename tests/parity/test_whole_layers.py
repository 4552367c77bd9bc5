"""Layers that are one operator, weights in bfloat16: equal in every mode, whatever the layers hold."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from families import build
from parity.test_families import LENS_AND_SHORTLIST, NEW_TOKENS, PROMPTS, check_batch
from tiers import exhaustive_but
from tiny_configs import CHECKPOINTS
from tiny_engines import engine_of, pieces_of

from tide_export.model.source import wrap_model
from tide_export.names.operators import OP_LAYERS
from tide_export.routers.random_routers import random_routers
from tide_export.thresholds.resolve import NEVER_EXIT
from tide_export.verify.export_gate import dividing_thresholds
from tide_export.verify.parity import check_exit, check_full, check_lossless
from tide_export.verify.step_graph import StepGraph

# Family -> operators that must be in the layers' one, none of them beside it.
HELD = {
    "qwen3": {"RMSNormalization", "RotaryEmbedding", "Neg", "Cos"},
    "gemma3 (text)": {"RMSNormalization", "Gelu", "Transpose"},
    "phi": {"TidePagedAttention", "RotaryEmbedding", "Neg", "Cos"},
    "lfm2": {"TideCausalConv", "Transpose", "Split"},
    "falcon_h1": {"TideCausalConv", "TideRecurrence", "Softplus", "Exp"},
    "qwen3_5 (text)": {"TidePagedAttention", "RotaryEmbedding", "Neg", "Cos", "ScatterND"},
    "cohere2": {"TidePagedAttention", "ReduceMean", "Sub", "Neg", "Cos"},
    "smollm3": {"TidePagedAttention", "RotaryEmbedding"},
    "qwen3_moe": {"TideBf16ExpertMatMul", "TideGate", "Mul", "Split", "Expand"},
    "gpt_oss": {"TideBf16ExpertMatMul", "TidePagedAttention", "Mul", "Clip", "Split", "Cos", "Expand"},
}


@pytest.mark.parametrize("family", exhaustive_but(["gemma3 (text)", "falcon_h1", "cohere2", "gpt_oss"], HELD))
def test_whole_layers_are_equal(family: str, tmp_path: Path) -> None:
    model = build(family).model
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point() and tensor.ndim > 1:
                tensor.copy_(tensor.bfloat16())
    source = wrap_model(model, family)
    routers = random_routers(source, CHECKPOINTS, PROMPTS[2], bottleneck=16, **LENS_AND_SHORTLIST)
    engine = engine_of(source, routers, tmp_path / "bundle", pieces_of(source, CHECKPOINTS), half="bf16")
    graph = onnx.load(tmp_path / "bundle" / "model.onnx", load_external_data=False).graph
    kinds = set(_kinds(graph))
    assert OP_LAYERS in kinds
    assert kinds.isdisjoint(HELD[family]), "some nodes of layers are outside their operator"

    full = check_full(engine, source, PROMPTS, NEW_TOKENS)
    assert full.holds, full.differences
    assert full.max_error < 1e-3
    middle = dividing_thresholds(source, routers, PROMPTS[2])
    for thresholds, max_pending in (([0.3] * 2, 1), (middle, 16)):
        check = check_exit(engine, source, routers, PROMPTS, NEW_TOKENS, thresholds, max_pending)
        assert check.holds, (thresholds, max_pending, check.differences)
    drafts = check_lossless(engine, source, PROMPTS, NEW_TOKENS, threshold=0.0, max_pending=3)
    assert drafts.holds, drafts.differences
    check_batch(engine, middle)

    never = [NEVER_EXIT] * len(CHECKPOINTS)
    by_functions = StepGraph(engine.bundle).start(never, 0).step(PROMPTS[2]).logits
    np.testing.assert_allclose(by_functions, engine.start(never).step(PROMPTS[2]).logits, rtol=1e-3, atol=1e-3)


def _kinds(graph: onnx.GraphProto):
    """The operators of a graph and its branches, not those in functions."""
    for node in graph.node:
        yield node.op_type
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _kinds(attribute.g)
