"""Makes rotations of queries and keys `RotaryEmbedding`, where the exporter's own rule does not.

Its rule takes cosines of angles that are repeated for both halves of a head. Here any cosines and sines may be: those
that a scaling factor multiplies (yarn), and those that are chosen by sections for images (M-RoPE).
"""

import onnx_ir as ir
from onnx_ir.passes import common as common_passes
from onnxscript.rewriter import MatchResult, RewriteRuleSet
from onnxscript.rewriter.pattern import RewriteRuleClassBase
from onnxscript.rewriter.rules.fusion import _rotary_embedding as exporter_rules

from tide_export.graph.rewriting import rank


class SplitRotationsPass(ir.passes.InPlacePass):
    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = RewriteRuleSet([_RepeatedCosines.rule()]).apply_to_model(model)
        common_passes.RemoveUnusedNodesPass()(model)  # the next rule removes what it replaces, if nothing else reads it
        RewriteRuleSet([exporter_rules.PartialRotaryEmbedding23Fusion.rule()]).apply_to_model(model)
        common_passes.CommonSubexpressionEliminationPass()(model)  # or each rotation has tables of its own
        return ir.passes.PassResult(model, modified=found > 0)


class _RepeatedCosines(RewriteRuleClassBase):
    """`x * cos + [-second half, first half] * sin`, where cos and sin are the same for both halves."""

    def __init__(self) -> None:
        super().__init__(remove_nodes=False)  # rotations of queries and keys share cosines and sines

    def pattern(self, op, x, cos, sin, start1, end1, start2, end2, one1, one2) -> ir.Value:
        halves = exporter_rules._rotate_half_pattern(op, x, start1, end1, start2, end2)
        return x * op.Unsqueeze(cos, one1) + halves * op.Unsqueeze(sin, one2)

    def check(self, op, x, cos, sin, **others) -> MatchResult:
        result = exporter_rules.RotaryEmbedding23Fusion().check(op, x, **others)
        if result and not (_repeats(cos) and _repeats(sin)):
            return result.fail("cosines or sines are not the same for both halves")
        return result

    def rewrite(self, op, x, cos, sin, **_) -> ir.Value:
        begin, axis = op.Constant(value_ints=[0]), op.Constant(value_ints=[2])
        half = op.Constant(value_ints=[x.shape[3] // 2])
        tables = [op.Slice(value, begin, half, axis) for value in (cos, sin)]
        return op.RotaryEmbedding(x, *tables, interleaved=0, num_heads=x.shape[1])


def _repeats(value: ir.Value) -> bool:
    """Whether both halves of the last axis are the same: repeated numbers, and functions of each of these."""
    node = value.producer()
    if node is None:
        return False
    if node.op_type == "Concat" and node.attributes.get_int("axis", 0) in (-1, (rank(value) or 0) - 1):
        return len(node.inputs) == 2 and node.inputs[0] is node.inputs[1]
    varied = [each for each in node.inputs if each is not None and rank(each) != 0]
    return node.op_type in ("Cos", "Sin", "Mul", "Cast") and len(varied) == 1 and _repeats(varied[0])
