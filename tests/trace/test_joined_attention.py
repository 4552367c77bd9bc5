"""Several attentions of a layer become one where that computes the same, and stay where it would not."""

import onnx.parser
import onnx_ir as ir
import pytest

from tide_export.names.operators import DOMAIN, OP_ATTENTION
from tide_export.trace.attention.joined import JoinedAttentionPass

RULE = "layer = 0, head_dim = 8, scale = 0.5"
GROUPED = f"{RULE}, num_heads = 4, kv_num_heads = 2"
TEMPLATE = """
<ir_version: 10, opset_import: ["" : 23, "tide" : 1]>
layer (float[B,4,S,8] q, float[B,2,S,8] k, float[B,2,S,8] v, float[B,2,S,8] w) => (float[B,S,4,8] out)
<float[B,S,4,8] first, float[B,S,4,8] doubled, float[B,S,4,8] second, float[B,4,S,8] again>
{{
  first = tide.TideAttention <{first}> (q, k, v)
  doubled = Add (first, first)
  again = Transpose <perm = [0, 2, 1, 3]> (doubled)
  second = tide.TideAttention <{second}> ({query}, k, w)
  out = Sub (doubled, second)
}}
"""


def attentions(second: str, query: str = "q") -> tuple[ir.Model, list[ir.Node]]:
    text = TEMPLATE.format(first=GROUPED, second=second, query=query)
    model = ir.from_proto(onnx.parser.parse_model(text))
    for node in model.graph:
        node.name = f"{node.op_type}_{node.outputs[0].name}"
    JoinedAttentionPass()(model)
    return model, [node for node in model.graph if (node.domain, node.op_type) == (DOMAIN, OP_ATTENTION)]


def test_attentions_that_attend_alike_become_one() -> None:
    model, (node,) = attentions(GROUPED)
    assert [node.attributes[name].as_int() for name in ("num_heads", "kv_num_heads", "head_dim")] == [8, 4, 8]
    parts = [[value.name for value in item.producer().inputs] for item in node.inputs]
    assert parts == [["q", "q"], ["k", "k"], ["v", "w"]]
    order = [item.op_type for item in model.graph]
    assert order == ["Concat"] * 3 + [OP_ATTENTION, "Split", "Add", "Sub"]  # what reads the first comes after both
    split, doubled, result = list(model.graph)[4:]
    assert list(split.outputs) == [doubled.inputs[0], result.inputs[1]]
    assert split.inputs[1].const_value.numpy().tolist() == [4, 4]


@pytest.mark.parametrize(
    ("second", "query"),
    [
        (f"{GROUPED}, window = 4", "q"),
        (f"{RULE}, num_heads = 4, kv_num_heads = 4", "q"),
        (GROUPED.replace("0.5", "0.25"), "q"),
        (GROUPED.replace("layer = 0", "layer = 1"), "q"),
        (GROUPED, "again"),
    ],
    ids=["window", "other groups", "scale", "another layer", "one after another"],
)
def test_others_stay(second: str, query: str) -> None:
    assert len(attentions(second, query)[1]) == 2
