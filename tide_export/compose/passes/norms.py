"""Replaces norms that the exporter leaves as many nodes.

An RMS norm without a weight (Gemma 3n and 4, Mamba 2) gets one of ones. An RMS norm of hidden states less their mean is
a layer norm (Cohere).
"""

import numpy as np
import onnx_ir as ir

from tide_export.graph.rewriting import (
    FLOAT,
    constant,
    ensure_none_left,
    is_weight,
    last_dim,
    nodes_of,
    number_of,
    op_before,
    producer,
    rank,
    replace_value,
)


class NormsPass(ir.passes.InPlacePass):
    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        bare = [(node, *found) for node in nodes_of(graph, "Mul") if (found := _bare(node)) is not None]
        for node, hidden, epsilon in bare:
            width = last_dim(hidden) or 0
            ones = constant(graph, f"ones_{width}", np.ones(width, np.float32))
            _replace(node, "RMSNormalization", [hidden, ones], epsilon)
        centered = [(node, x) for node in nodes_of(graph, "RMSNormalization") if (x := _centered(node)) is not None]
        for node, x in centered:
            _replace(node, "LayerNormalization", [x, node.inputs[1]], node.attributes.get_float("epsilon", 1e-5))
        return ir.passes.PassResult(model, modified=bool(bare or centered))

    def ensures(self, model: ir.Model) -> None:
        ensure_none_left(node for node in nodes_of(model.graph, "Mul") if _bare(node) is not None)
        ensure_none_left(node for node in nodes_of(model.graph, "RMSNormalization") if _centered(node) is not None)


def _replace(node: ir.Node, norm: str, inputs: list[ir.Value | None], epsilon: float) -> None:
    old = node.outputs[0]
    attributes = {"axis": -1, "epsilon": epsilon}
    replace_value(old, op_before(node, norm, inputs, attributes, dtype=old.dtype, shape=old.shape))


def _bare(product: ir.Node) -> tuple[ir.Value, float] | None:
    """Returns x and epsilon of `x * 1 / sqrt(mean(x ** 2) + epsilon)`; None: it is another product."""
    for x, factor in (product.inputs, product.inputs[::-1]):
        inverse = producer(factor, "Reciprocal")
        root = producer(inverse.inputs[0], "Sqrt") if inverse is not None else None
        total = producer(root.inputs[0], "Add") if root is not None else None
        mean = producer(total.inputs[0], "ReduceMean") if total is not None else None
        power = producer(mean.inputs[0], "Pow") if mean is not None else None
        if x is None or total is None or mean is None or power is None or power.inputs[0] is not x:
            continue
        epsilon, exponent = number_of(total.inputs[1]), number_of(power.inputs[1])
        known = x.dtype == FLOAT and last_dim(x) is not None and exponent == 2
        if known and epsilon is not None and _is_of_last_axis(mean):
            return x, epsilon
    return None


def _centered(norm: ir.Node) -> ir.Value | None:
    """Returns what has its mean over the last axis subtracted before the norm; None: nothing has."""
    last = (rank(norm.inputs[0]) or 0) - 1
    difference = producer(norm.inputs[0], "Sub")
    mean = producer(difference.inputs[1], "ReduceMean") if difference is not None else None
    if difference is None or mean is None or mean.inputs[0] is not difference.inputs[0] or not _is_of_last_axis(mean):
        return None
    of_row = norm.attributes.get_int("axis", -1) in (-1, last) and is_weight(norm.inputs[1], 1)
    return difference.inputs[0] if of_row and last_dim(norm.inputs[1]) == last_dim(norm.inputs[0]) else None


def _is_of_last_axis(mean: ir.Node) -> bool:
    axis, last = number_of(mean.inputs[1] if len(mean.inputs) > 1 else None), (rank(mean.inputs[0]) or 0) - 1
    return axis in (-1, last) and bool(mean.attributes.get_int("keepdims", 1))
