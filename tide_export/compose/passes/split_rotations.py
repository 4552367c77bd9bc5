"""Makes rotations of queries and keys `RotaryEmbedding`, where the exporter's own rule does not.

Its rule takes cosines of angles that are repeated for both halves of a head. Here any cosines and sines may be: those
that a scaling factor multiplies (yarn), and those that are chosen by sections for images (M-RoPE); and halves that are
rotated one by one (gpt-oss), by cosines of half a head's width.
"""

import onnx_ir as ir
from onnx_ir.passes import common as common_passes
from onnxscript.rewriter import MatchResult, RewriteRuleSet
from onnxscript.rewriter.pattern import RewriteRuleClassBase
from onnxscript.rewriter.rules.fusion import _rotary_embedding as exporter_rules

from tide_export.graph.rewriting import rank


class SplitRotationsPass(ir.passes.InPlacePass):
    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = RewriteRuleSet([_RepeatedCosines.rule(), _Halves.rule()]).apply_to_model(model)
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


class _Halves(RewriteRuleClassBase):
    """`[first * cos - second * sin, second * cos + first * sin]` of the halves of x."""

    def __init__(self) -> None:
        super().__init__(remove_nodes=False)

    def pattern(self, op, x, cos, sin, one1, one2) -> ir.Value:
        first, second = op.Split(x, axis=-1, num_outputs=2, _outputs=["first", "second"])
        cosines, sines = op.Unsqueeze(cos, one1), op.Unsqueeze(sin, one2)
        return op.Concat(first * cosines - second * sines, second * cosines + first * sines, axis=-1)

    def check(self, op, x, cos, sin, one1, one2, **_) -> MatchResult:
        result = MatchResult()
        shape, half = x.shape, cos.shape
        if shape is None or len(shape) != 4 or not all(isinstance(shape[axis], int) for axis in (1, 3)):
            return result.fail("x is no heads of a known number and width")
        if any(axis.const_value is None or axis.const_value.numpy().tolist() not in ([1], 1) for axis in (one1, one2)):
            return result.fail("cosines or sines are not the same for all heads")
        if half is None or len(half) != 3 or half[2] != shape[3] // 2 or shape[3] % 2:
            return result.fail("cosines are not of half a head")
        return result

    def rewrite(self, op, x, cos, sin, **_) -> ir.Value:
        return op.RotaryEmbedding(x, cos, sin, interleaved=0, num_heads=x.shape[1])


def _repeats(value: ir.Value) -> bool:
    """Whether both halves of the last axis are the same: repeated numbers, and functions of each of these."""
    node = value.producer()
    if node is None:
        return False
    if node.op_type == "Concat" and node.attributes.get_int("axis", 0) in (-1, (rank(value) or 0) - 1):
        return len(node.inputs) == 2 and node.inputs[0] is node.inputs[1]
    varied = [each for each in node.inputs if each is not None and rank(each) != 0]
    return node.op_type in ("Cos", "Sin", "Mul", "Cast") and len(varied) == 1 and _repeats(varied[0])
