"""The composed graph as a document: one `If` a segment, functions with plugin attributes, weights stored once,
valid."""

import collections
import logging
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from tiny_configs import HEADS
from transformers import LlamaConfig, LlamaForCausalLM

from tide_export.bundle.file_names import GRAPH_FILE
from tide_export.compose.cut import cut
from tide_export.compose.step_graph import compose
from tide_export.errors import GraphError
from tide_export.lower.onnxruntime.lower import lower_for_onnxruntime
from tide_export.lower.onnxruntime.paged_attention import Form, form_of, options_of
from tide_export.model.source import wrap_model
from tide_export.names import step_graph as names
from tide_export.names.operators import OP_ATTENTION, OP_CANDIDATE, OP_LENS_CANDIDATE, OP_MARKER, OP_PAGED_ATTENTION
from tide_export.routers.router import LensArrays, RouterArrays
from tide_export.runtime.engine import load
from tide_export.thresholds.resolve import NEVER_EXIT
from tide_export.trace.tracer import trace

CHECKPOINTS = (3, 6, 9)


@pytest.fixture(scope="module")
def pieces(demo_source, traces):
    return cut(traces(demo_source, CHECKPOINTS), 1024)


def random_arrays(width: int, shortlist: int = 0, hidden: int = 8) -> dict[int, RouterArrays]:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    rows = draw(width, shortlist) if shortlist else None
    return {
        c: RouterArrays(draw(width, hidden), draw(hidden, 1), 0.5, rows, draw(2, hidden) if shortlist else None)
        for c in CHECKPOINTS
    }


def random_lenses(width: int, rank: int = 4) -> dict[int, LensArrays]:
    rng = np.random.default_rng(1)
    shapes = ((width, rank), (rank, width), (width,))
    return {c: LensArrays(*(rng.normal(size=shape).astype(np.float32) for shape in shapes)) for c in CHECKPOINTS}


@pytest.fixture(scope="module")
def routers(demo_source):
    return random_arrays(demo_source.normalized_size)


@pytest.fixture(scope="module")
def composed(pieces, routers):
    """Routers of TIDE's form, no lens."""
    return compose(pieces, routers)


@pytest.fixture(scope="module")
def model(pieces, routers):
    return lower_for_onnxruntime(compose(pieces, routers))  # lowering changes its graph


@pytest.fixture(scope="module")
def full_form(demo_source, pieces):
    """Routers with a shortlist of 6 tokens, and lenses."""
    return compose(
        pieces, random_arrays(demo_source.normalized_size, shortlist=6), random_lenses(demo_source.hidden_size)
    )


def test_the_bundle_graph_passes_the_checker_with_shape_inference(demo_bundle: Path) -> None:
    onnx.checker.check_model(str(demo_bundle / GRAPH_FILE), full_check=True)


def test_one_if_per_segment_after_the_first(model) -> None:
    ifs = [node for node in model.graph if node.op_type == "If"]
    assert len(ifs) == 3
    for k, node in enumerate(ifs, start=1):
        skip, run = node.attributes["then_branch"].as_graph(), node.attributes["else_branch"].as_graph()
        assert (skip.name, run.name) == (f"skip_{k}", f"segment_{k}")
        assert {n.op_type for n in skip} == {"Identity"}
        assert sum(n.op_type == "TidePagedAttention" for n in run) == 3


def test_a_checkpoint_is_one_function_that_an_operator_can_replace(model) -> None:
    assert list(model.functions) == [("tide", "TideCandidate", ""), ("tide", "TidePagedAttention", "")]
    calls = [node for node in model.graph.all_nodes() if node.op_type == "TideCandidate"]
    assert len(calls) == len(CHECKPOINTS)
    for call in calls:
        assert call.attributes["norm"].as_string() == "rms"
        assert (call.attributes["lens"].as_int(), call.attributes["shortlist"].as_int()) == (0, 0)


def test_checkpoints_with_and_without_a_lens_are_two_functions(demo_source, pieces) -> None:
    lenses = random_lenses(demo_source.hidden_size)
    model = compose(pieces, random_arrays(demo_source.normalized_size), {6: lenses[6]})
    called = [node.op_type for node in model.graph.all_nodes() if node.domain == "tide" and "Candidate" in node.op_type]
    assert called == ["TideCandidate", "TideLensCandidate", "TideCandidate"]
    assert [len(function.inputs) for function in model.functions.values()] == [7, 10]


def test_our_operator_names_collide_with_no_onnx_operator() -> None:
    # TensorRT dispatches on the bare op type, whatever its domain.
    known = {schema.name for schema in onnx.defs.get_all_schemas_with_history()}
    ours = {OP_ATTENTION, OP_MARKER, OP_CANDIDATE, OP_LENS_CANDIDATE}
    ours |= set(OP_PAGED_ATTENTION.values())
    assert not known & ours


def test_every_projection_is_packed_and_every_rotation_is_inside_attention(model) -> None:
    count = collections.Counter(node.op_type for node in model.graph.all_nodes())
    assert count["TidePagedAttention"] == 12
    assert count["MatMul"] == 12 * 5
    assert count["Transpose"] == count["RotaryEmbedding"] == 0
    assert count["Gemm"] == 1
    # All norms of the layers but the first of each segment, whose addition is in the segment before; and the final
    # norm after the last segment.
    assert count["SkipSimplifiedLayerNormalization"] == 24 - 4 + 1
    for node in model.graph.all_nodes():
        if node.op_type == "TidePagedAttention":
            assert node.inputs[1] is None
            assert form_of(node) == Form.PACKED
            assert options_of(node) == ["rotation"]


def test_weights_are_stored_once_and_the_tied_head_shares_the_embedding(model, demo_source, demo_bundle: Path) -> None:
    stored = sum(value.const_value.nbytes for value in model.graph.initializers.values())
    weights = sum(p.numel() * 4 for p in demo_source.model.parameters())
    tables = 2 * 1024 * 16 * 4
    assert weights < stored < weights + tables + 3 * (128 * 8 + 8) * 4 + 4096
    for node in model.graph.all_nodes():
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                assert not attribute.as_graph().initializers


def test_the_head_reads_as_many_last_positions_as_are_requested(demo_source, demo_bundle: Path) -> None:
    engine, ids = load(demo_bundle), (np.arange(20) * 37 % demo_source.vocab_size).tolist()
    full = engine.start([NEVER_EXIT] * len(CHECKPOINTS))
    assert full.step(ids).position_logits.shape == (1, demo_source.vocab_size)
    full.rewind(0)
    rows = full.step(ids, logits_to_keep=7).position_logits
    with torch.no_grad():
        expected = demo_source.model(torch.tensor([ids])).logits[0, -7:].numpy()
    np.testing.assert_allclose(rows, expected, atol=2e-4)
    exiting = engine.start([-1.0] * len(CHECKPOINTS), max_pending=100)
    assert exiting.step(ids, logits_to_keep=7).position_logits.shape == (1, demo_source.vocab_size)


def test_lowering_logs_what_each_pass_changed(pieces, routers, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "tide_export")
    lower_for_onnxruntime(compose(pieces, routers))
    layers = pieces.boundaries[-1]
    attention = f"-{layers} tide::TideAttention, +{layers} tide::TidePagedAttention"
    assert any(line.startswith("PagedAttentionPass: ") and line.endswith(attention) for line in caplog.messages)


def test_without_checkpoints_the_graph_has_no_branch_and_no_exit_inputs() -> None:
    torch.manual_seed(0)
    source = wrap_model(LlamaForCausalLM(LlamaConfig(**{**HEADS, "num_hidden_layers": 1})), "one layer")
    model = lower_for_onnxruntime(compose(cut(trace(source, ()), 64), {}))
    assert not any(node.op_type == "If" for node in model.graph)
    assert {value.name for value in model.graph.inputs if not value.name.startswith("pages")} == {
        names.INPUT_IDS,
        names.SEQUENCE_LENGTHS,
        names.PAGE_TABLE,
        names.LOGITS_POSITIONS,
    }


@pytest.mark.parametrize(("form", "parameters"), [("composed", 7), ("full_form", 12)])
def test_every_checkpoint_has_the_function_s_inputs(request, form: str, parameters: int) -> None:
    """States, last tokens, thresholds, router, the norm's scale; a shortlist and confidence; a lens's three."""
    model = request.getfixturevalue(form)
    (function,) = model.functions.values()
    assert len(function.inputs) == parameters
    calls = [node for node in model.graph.all_nodes() if node.op_type == function.name]
    assert [len(call.inputs) for call in calls] == [parameters] * len(CHECKPOINTS)
    count = collections.Counter(node.op_type for node in function)
    assert count["TopK"] == count["LogSoftmax"] == (form == "full_form")


def test_every_checkpoint_has_a_lens_and_the_last_segment_has_none(full_form, composed) -> None:
    stored = {name for name in full_form.graph.initializers if name.startswith("lenses.")}
    assert stored == {f"lenses.{c}.{part}" for c in CHECKPOINTS for part in ("down", "up", "bias")}
    matmuls = [sum(node.op_type == "MatMul" for f in m.functions.values() for node in f) for m in (full_form, composed)]
    assert matmuls == [2 + 2 + 2, 2]  # router; shortlist and confidence; lens


def test_a_missing_router_or_one_of_another_width_is_refused(pieces, routers) -> None:
    with pytest.raises(GraphError, match="after layer 9"):
        compose(pieces, {c: routers[c] for c in (3, 6)})
    with pytest.raises(GraphError, match="no router of width 128"):
        compose(pieces, random_arrays(64))


def test_the_shortlist_is_stored_once(full_form) -> None:
    assert [name for name in full_form.graph.initializers if "shortlist" in name] == ["shortlist"]


def test_routers_of_two_shortlists_are_refused(pieces, routers) -> None:
    with pytest.raises(GraphError, match="differ in their shortlists"):
        compose(pieces, routers | {6: random_arrays(128, shortlist=6)[6]})
    with pytest.raises(GraphError, match="differ in their shortlists"):
        compose(pieces, random_arrays(128, shortlist=6) | {6: random_arrays(128, shortlist=7)[6]})


def test_a_lens_of_another_width_is_refused(pieces, routers) -> None:
    with pytest.raises(GraphError, match="the lens for the checkpoint after layer 3 is not of width 128"):
        compose(pieces, routers, random_lenses(64))
