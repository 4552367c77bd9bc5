"""Makes rotations of queries and keys `RotaryEmbedding`, where the exporter's own rule does not.

Its rule takes cosines of angles that are repeated for both halves of a head. Here any cosines and sines may be: those
that a scaling factor multiplies (yarn), and those that are chosen by sections for images (M-RoPE), of heads before or
after the tokens' axis (Gemma 3n and 4); halves that are rotated one by one (gpt-oss), by cosines of half a head's
width; and neighbours that are rotated (GLM, ERNIE, Cohere).
"""

import onnx_ir as ir
from onnx_ir.passes import common as common_passes
from onnxscript.rewriter import MatchResult, RewriteRuleSet
from onnxscript.rewriter.pattern import RewriteRuleClassBase
from onnxscript.rewriter.rules.fusion import _rotary_embedding as exporter_rules

from tide_export.graph.rewriting import SWAP_HEADS, nodes_of, number_of, producer, rank, required


class SplitRotationsPass(ir.passes.InPlacePass):
    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = RewriteRuleSet([_RepeatedCosines.rule(), _Halves.rule(), _Neighbours.rule()]).apply_to_model(model)
        common_passes.RemoveUnusedNodesPass()(model)  # the next rule removes what it replaces, if nothing else reads it
        RewriteRuleSet([_Part.rule()]).apply_to_model(model)
        _keep_shapes(model.graph)
        for node in nodes_of(model.graph, "Transpose"):
            _undo_twice(node)
        common_passes.CommonSubexpressionEliminationPass()(model)  # or each rotation has tables of its own
        return ir.passes.PassResult(model, modified=found > 0)


def _keep_shapes(graph: ir.Graph) -> None:
    """Gives values that a rule added between others their types and shapes."""
    for node in graph:
        swaps = list(node.attributes.get_ints("perm", [])) == SWAP_HEADS
        if node.outputs[0].shape is not None or not (swaps or node.op_type == "RotaryEmbedding"):
            continue
        x, result = required(node.inputs[0]), node.outputs[0]
        result.type = x.type
        if x.shape is not None:
            result.shape = ir.Shape([x.shape[axis] for axis in SWAP_HEADS]) if swaps else x.shape


def _undo_twice(node: ir.Node) -> None:
    """Lets readers of a Transpose that undoes another read what that one reads."""
    before = producer(node.inputs[0], "Transpose")
    if before is None or node.outputs[0].is_graph_output():
        return
    if all(list(each.attributes.get_ints("perm", [])) == SWAP_HEADS for each in (node, before)):
        node.outputs[0].replace_all_uses_with(required(before.inputs[0]))


class _RepeatedCosines(RewriteRuleClassBase):
    """`x * cos + [-second half, first half] * sin`, where cos and sin are the same for both halves."""

    def __init__(self) -> None:
        super().__init__(remove_nodes=False)  # rotations of queries and keys share cosines and sines

    def pattern(self, op, x, cos, sin, start1, end1, start2, end2, one1, one2) -> ir.Value:
        halves = exporter_rules._rotate_half_pattern(op, x, start1, end1, start2, end2)
        return x * op.Unsqueeze(cos, one1) + halves * op.Unsqueeze(sin, one2)

    def check(self, op, x, cos, sin, start1, end1, start2, end2, one1, one2, **_) -> MatchResult:
        result, heads = MatchResult(), number_of(one1)
        if heads not in (1, 2) or number_of(one2) != heads:
            return result.fail("cosines or sines are not the same for all heads")
        if x.shape is None or len(x.shape) != 4 or not all(isinstance(x.shape[axis], int) for axis in (heads, 3)):
            return result.fail("x is no heads of a known number and width")
        half, ends = x.shape[3] // 2, [number_of(value) for value in (start1, end1, start2)]
        if ends != [0, half, half] or (number_of(end2) or 0) < x.shape[3]:
            return result.fail("they are no halves")
        if not (_repeats(cos) and _repeats(sin)):
            return result.fail("cosines or sines are not the same for both halves")
        return result

    def rewrite(self, op, x, cos, sin, one1, **_) -> ir.Value:
        begin, axis = op.Constant(value_ints=[0]), op.Constant(value_ints=[2])
        half = op.Constant(value_ints=[x.shape[3] // 2])
        tables = [op.Slice(value, begin, half, axis) for value in (cos, sin)]
        if number_of(one1) == 1:
            return op.RotaryEmbedding(x, *tables, interleaved=0, num_heads=x.shape[1])
        turned = op.Transpose(x, perm=SWAP_HEADS)
        rotated = op.RotaryEmbedding(turned, *tables, interleaved=0, num_heads=x.shape[2])
        return op.Transpose(rotated, perm=SWAP_HEADS)


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
        if {number_of(one1), number_of(one2)} != {1}:
            return result.fail("cosines or sines are not the same for all heads")
        if half is None or len(half) != 3 or half[2] != shape[3] // 2 or shape[3] % 2:
            return result.fail("cosines are not of half a head")
        return result

    def rewrite(self, op, x, cos, sin, **_) -> ir.Value:
        return op.RotaryEmbedding(x, cos, sin, interleaved=0, num_heads=x.shape[1])


class _Neighbours(RewriteRuleClassBase):
    """`x * cos + [-second, first of each two] * sin`, where cos and sin are the same for both."""

    def __init__(self) -> None:
        super().__init__(remove_nodes=False)

    def pattern(self, op, x, cos, sin, start1, start2, end1, end2, axis1, axis2, step1, step2, m1, m2, shape):
        first = op.Slice(x, start1, end1, axis1, step1)
        second = op.Slice(x, start2, end2, axis2, step2)
        pairs = op.Concat(op.Unsqueeze(op.Neg(second), m2), op.Unsqueeze(first, m1), axis=-1)
        return x * cos + op.Reshape(pairs, shape) * sin

    def check(self, op, x, cos, sin, start1, start2, end1, end2, axis1, axis2, step1, step2, m1, m2, **_):
        result = MatchResult()
        if x.shape is None or len(x.shape) != 4 or not all(isinstance(x.shape[axis], int) for axis in (1, 3)):
            return result.fail("x is no heads of a known number and width")
        width = x.shape[3]
        halves = (start1, start2, axis1, axis2, step1, step2)
        if tuple(map(number_of, halves)) not in {(0, 1, axis, axis, 2, 2) for axis in (3, -1)}:
            return result.fail("they are no neighbours")
        if min(number_of(end1) or 0, number_of(end2) or 0) < width or {number_of(m1), number_of(m2)} - {4, -1}:
            return result.fail("they are not all neighbours")
        for table in (cos, sin):
            if table.shape is None or len(table.shape) != 4 or table.shape[1] != 1 or table.shape[3] != width:
                return result.fail("cosines or sines are not the same for all heads")
            if not _repeats_each(table):
                return result.fail("cosines or sines are not the same for neighbours")
        return result

    def rewrite(self, op, x, cos, sin, **_) -> ir.Value:
        zero, end, heads = (op.Constant(value_ints=[number]) for number in (0, x.shape[3], 1))
        axis, step = op.Constant(value_ints=[3]), op.Constant(value_ints=[2])
        tables = [op.Squeeze(op.Slice(value, zero, end, axis, step), heads) for value in (cos, sin)]
        return op.RotaryEmbedding(x, *tables, interleaved=1, num_heads=x.shape[1])


class _Part(exporter_rules.PartialRotaryEmbedding23Fusion):
    """The exporter's rule for a rotation of a head's first numbers, for neighbours too."""

    def check(self, op, x, end1, start2, x_part_1_rope, **_) -> MatchResult:
        result = MatchResult()
        if number_of(end1) is None or number_of(end1) != number_of(start2):
            return result.fail("the parts do not meet")
        if "rotary_embedding_dim" in x_part_1_rope.producer().attributes:
            return result.fail("it rotates a part already")
        return result


def _repeats_each(value: ir.Value | None) -> bool:
    """Whether each two neighbours of the last axis are the same: repeated numbers, and functions of these."""
    node = None if value is None else value.producer()
    if value is None or node is None:
        return False
    if node.op_type == "Reshape":
        expand = node.inputs[0].producer() if node.inputs[0] is not None else None
        wide, merged = (list(each.shape or []) for each in (node.inputs[0] or value, value))
        repeated = expand is not None and expand.op_type == "Expand" and wide[-1:] == [2]
        return repeated and len(wide) == len(merged) + 1 and merged[-1] == 2 * wide[-2]
    if node.op_type == "Unsqueeze" and number_of(node.inputs[1]) in (0, 1):
        return _repeats_each(node.inputs[0])
    varied = [each for each in node.inputs if each is not None and rank(each) != 0]
    return node.op_type in ("Cos", "Sin", "Mul", "Cast") and len(varied) == 1 and _repeats_each(varied[0])


def _repeats(value: ir.Value) -> bool:
    """Whether both halves of the last axis are the same: repeated numbers, and functions of each of these."""
    node = value.producer()
    if node is None:
        return False
    if node.op_type == "Concat" and node.attributes.get_int("axis", 0) in (-1, (rank(value) or 0) - 1):
        return len(node.inputs) == 2 and node.inputs[0] is node.inputs[1]
    varied = [each for each in node.inputs if each is not None and rank(each) != 0]
    return node.op_type in ("Cos", "Sin", "Mul", "Cast") and len(varied) == 1 and _repeats(varied[0])
