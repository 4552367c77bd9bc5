"""Joins the attentions of a layer into one, which has the heads of all.

Differential attention (arXiv 2410.05258) attends twice with the same queries and keys, to two halves of the values.
Heads do not read each other, so one attention with the heads of both computes the same, and the layer has one K/V
cache; keys that several attentions read are in it as often.
"""

from collections import defaultdict

import onnx_ir as ir
from onnx_ir.passes import common as common_passes

from tide_export.graph.rewriting import dims, graph_of, integers, nodes_of, op_before, ops_before
from tide_export.names.operators import DOMAIN, OP_ATTENTION

_COUNTS = ("num_heads", "kv_num_heads")


class JoinedAttentionPass(ir.passes.InPlacePass):
    """Joins those `TideAttention`s of a layer that attend alike and do not read each other's results."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        layers: dict[int, list[ir.Node]] = defaultdict(list)
        for node in nodes_of(model.graph, OP_ATTENTION, DOMAIN):
            layers[node.attributes["layer"].as_int()].append(node)
        several = [nodes for nodes in layers.values() if len(nodes) > 1 and _can_be_joined(nodes)]
        for nodes in several:
            _join(nodes)
        if several:
            model.graph.sort()  # what reads the first of them may come before the last
            common_passes.RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified=bool(several))


def _can_be_joined(nodes: list[ir.Node]) -> bool:
    """Whether they differ in nothing but the number of heads, and no one is computed from another."""
    rules = {
        (
            node.attributes["num_heads"].as_int() // node.attributes["kv_num_heads"].as_int(),
            *sorted((name, item.value) for name, item in node.attributes.items() if name not in _COUNTS),
        )
        for node in nodes
    }
    plain = all(len(node.inputs) == 3 for node in nodes)  # neither sinks nor a bias
    return len(rules) == 1 and plain and not any(_reads(node, set(nodes)) for node in nodes)


def _reads(node: ir.Node, others: set[ir.Node]) -> bool:
    """Whether `node` is computed from one of `others`."""
    reached: set[ir.Node] = set()
    todo = [node]
    while todo:
        before = {item for value in todo.pop().inputs if value is not None and (item := value.producer()) is not None}
        if before & others:
            return True
        todo += before - reached
        reached |= before
    return False


def _join(nodes: list[ir.Node]) -> None:
    last, inputs = nodes[-1], []
    counts = {name: [node.attributes[name].as_int() for node in nodes] for name in _COUNTS}
    for name, parts in zip(("query", "key", "value"), zip(*(node.inputs for node in nodes), strict=True), strict=True):
        batch, _, tokens, width = dims(parts[0])
        shape = [batch, sum(counts["num_heads" if name == "query" else "kv_num_heads"]), tokens, width]
        inputs.append(
            op_before(last, "Concat", parts, {"axis": 1}, dtype=last.outputs[0].dtype, shape=shape, suffix=f"_{name}")
        )
    old = last.outputs[0]
    batch, tokens, _, width = dims(old)
    heads, attributes = counts["num_heads"], {**last.attributes, **{name: sum(counts[name]) for name in _COUNTS}}
    shape = [batch, tokens, sum(heads), width]
    output = op_before(last, OP_ATTENTION, inputs, attributes, domain=DOMAIN, dtype=old.dtype, shape=shape)
    sizes = integers(graph_of(last), "heads_" + "_".join(map(str, heads)), heads)
    types = [(old.dtype, [batch, tokens, count, width]) for count in heads]
    for node, part in zip(nodes, ops_before(last, "Split", [output, sizes], {"axis": 2}, types=types), strict=True):
        node.outputs[0].replace_all_uses_with(part, replace_graph_outputs=True)
