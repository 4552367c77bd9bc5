"""Attention that is spelled out in a trace becomes the symbolic op with its scale, window and bias, or is refused."""

import numpy as np
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator
from onnx_ir.convenience import extract
from written_attention import spelled_out

from tide_export.compose.cut import cut
from tide_export.errors import GraphError, UnsupportedModelError
from tide_export.names.operators import DOMAIN, OP_ATTENTION
from tide_export.trace.attention.matching import ExplicitAttentionPass
from tide_export.trace.attention.scores import MAX_LENGTH
from tide_export.trace.tracer import TracedModel

LENGTH = 24
HIDE = "logits = Where (causal, biased, least)"
PLACES = np.arange(LENGTH)


def attention_of(model: ir.Model, length: int = LENGTH) -> list[ir.Node]:
    ExplicitAttentionPass(length, "Toy")(model)
    return [node for node in model.graph if (node.domain, node.op_type) == (DOMAIN, OP_ATTENTION)]


@pytest.mark.parametrize(
    ("chain", "scale", "window", "bias"),
    [
        ("hidden = Where (causal, scores, least) logits = Mul (hidden, half)", 0.5, None, None),
        # The mask before the division, as CodeGen has it; a floor under the scores, as XGLM has it.
        (
            "mask = Where (causal, nought, least) masked = Add (scores, mask) floored = Max (masked, least)"
            "logits = Div (floored, two)",
            0.5,
            None,
            None,
        ),
        (
            "seen = Cast <to = 1> (causal) kept = Mul (scores, seen) rest = Sub (full, seen) hides = Mul (rest, low)"
            "masked = Add (kept, hides) logits = Mul (masked, half)",
            0.5,
            None,
            None,
        ),
        (
            "near = Add (distance, three) inside = Greater (near, zero) both = And (causal, inside)"
            "logits = Where (both, scores, least)",
            1.0,
            3,
            None,
        ),
        # ALiBi by key position, and by the distance between key and query: the same softmax.
        (f"alibi = Mul (slopes, place) biased = Add (scores, alibi) {HIDE}", 1.0, None, [0.5, 0.25]),
        (f"alibi = Mul (slopes, apart) biased = Add (scores, alibi) {HIDE}", 1.0, None, [0.5, 0.25]),
        (
            "alibi = Mul (slopes, place) mask = Where (causal, alibi, least) scaled = Mul (scores, half)"
            "logits = Add (scaled, mask)",
            0.5,
            None,
            [0.5, 0.25],
        ),
    ],
    ids=[
        "where",
        "codegen and xglm",
        "openai gpt",
        "window",
        "alibi by place",
        "alibi by distance",
        "alibi in the mask",
    ],
)
def test_scale_window_and_bias_are_read(chain: str, scale: float, window: int | None, bias: list[float] | None) -> None:
    model = spelled_out(chain)
    (node,) = attention_of(model)
    assert node.attributes["scale"].as_float() == scale
    assert node.attributes.get_int("window", 0) == (window or 0)
    assert [value.name for value in node.inputs[:3]] == ["q", "k", "v"]
    assert [node.attributes[name].as_int() for name in ("num_heads", "kv_num_heads", "head_dim")] == [2, 2, 8]
    if bias is None:
        assert len(node.inputs) == 3
    else:
        table = node.inputs[4].const_value.numpy()
        np.testing.assert_allclose(table, np.array(bias)[:, None] * PLACES, rtol=1e-6)
    assert {node.op_type for node in model.graph} == {"Project", OP_ATTENTION}
    assert model.graph.outputs[0].producer() is node


@pytest.mark.parametrize(
    ("chain", "reason"),
    [
        ("logits = Mul (scores, half)", "neither causal nor a window"),
        ("back = LessOrEqual (query, key) logits = Where (back, scores, least)", "neither causal nor a window"),
        ("own = Or (causal, first_head) logits = Where (own, scores, least)", "differently from head to head"),
        (f"far = Mul (apart, apart) biased = Add (scores, far) {HIDE}", "more than the key's position"),
        (f"by_token = Gather (table, input_ids) biased = Add (scores, by_token) {HIDE}", "depends on the tokens"),
        (f"gate = ReduceMean (v) biased = Add (scores, gate) {HIDE}", "depends on the tokens"),
        ("mask = Where (causal, shared, least) logits = Add (scores, mask)", "depends on the tokens, other than"),
        (
            "turned = Gather <axis = 1> (by_key, one_and_0) mask = Where (causal, turned, least)"
            "logits = Add (scores, mask)",
            "depends on the tokens, other than",
        ),
        (f"biased = Tanh (scores) {HIDE}", "by a Tanh that is not understood"),
        (f"biased = Mul (scores, slopes) {HIDE}", "by a Mul that is not understood"),
        ("seen = Cast <to = 1> (causal) logits = Mul (scores, seen)", "by 0 without hiding"),
        (f"biased = Sub (half, scores) {HIDE}", "by a Sub that is not understood"),
        (f"biased = Add (scores, scores) {HIDE}", "twice"),
        (
            "all = Cast <to = 1> (length) share = Div (place, all) alibi = Mul (slopes, share)"
            f"biased = Add (scores, alibi) {HIDE}",
            "changes with the length",
        ),
    ],
)
def test_anything_else_is_refused_with_the_reason(chain: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        attention_of(spelled_out(chain))
    assert str(caught.value).startswith("Toy ")
    assert "\n" not in str(caught.value)


def test_numbers_of_tokens_become_a_channel_of_the_keys() -> None:
    mask = "scaled = Mul (scores, half) mask = Where (causal, by_key, least)"
    model = spelled_out(f"{mask} logits = Add (scaled, mask)")
    (node,) = attention_of(model)
    assert (node.attributes["scale"].as_float(), node.attributes["head_dim"].as_int()) == (0.5, 16)
    rng = np.random.default_rng(0)
    given = {name: rng.random((1, 2, LENGTH, 8), dtype=np.float32) for name in "qkv"}
    given["by_key"] = rng.random((1, 2, 1, LENGTH), dtype=np.float32)
    values = {value.name: value for node in model.graph for value in node.outputs}
    piece = extract(model.graph, [values[name] for name in given], node.inputs[:3])
    query, key, value = ReferenceEvaluator(ir.to_proto(ir.Model(piece, ir_version=10))).run(None, given)
    scores = 0.5 * given["q"] @ given["k"].transpose(0, 1, 3, 2) + given["by_key"]
    np.testing.assert_allclose(0.5 * query @ key.transpose(0, 1, 3, 2), scores, rtol=1e-5)
    np.testing.assert_array_equal(value[..., :8], given["v"])
    assert not value[..., 8:].any()


def test_a_window_is_not_one_at_a_length_it_covers() -> None:
    near = "near = Add (distance, three) inside = Greater (near, zero) both = And (causal, inside)"
    (node,) = attention_of(spelled_out(f"{near} logits = Where (both, scores, least)"), length=3)
    assert "window" not in node.attributes


def test_a_model_without_a_softmax_over_keys_is_refused() -> None:
    model = spelled_out("logits = Where (causal, scores, least)")
    softmax = next(node for node in model.graph if node.op_type == "Softmax")
    softmax.outputs[0].replace_all_uses_with(softmax.inputs[0])
    with pytest.raises(UnsupportedModelError, match="nor by a softmax over keys"):
        attention_of(model)


def test_a_softmax_that_weighs_values_in_another_way_is_named() -> None:
    model = spelled_out("logits = Where (causal, scores, least)")
    matmul = next(node for node in model.graph if node.outputs[0].name == "context")
    matmul.op_type = "Einsum"
    with pytest.raises(UnsupportedModelError, match="Toy weighs its values by a Einsum that is not understood"):
        attention_of(model)


def test_more_tokens_than_a_mask_can_be_evaluated_for_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=f"at most {MAX_LENGTH}"):
        attention_of(spelled_out("logits = Where (causal, scores, least)"), length=MAX_LENGTH + 1)


def test_a_trace_made_for_shorter_sequences_is_not_cut_for_longer_ones() -> None:
    model = spelled_out(f"alibi = Mul (slopes, place) biased = Add (scores, alibi) {HIDE}")
    attention_of(model)
    with pytest.raises(GraphError, match="for 24 tokens, not 25"):
        cut(TracedModel(model, (0, 1)), LENGTH + 1)
