"""Adds the router to the function of a checkpoint: MLP (with the shortlist's summary), sigmoid."""

from collections.abc import Sequence

import onnx_ir as ir


def add_score(
    tape: ir.tape.Tape, states: ir.Value, router: Sequence[ir.Value], shortlist: Sequence[ir.Value]
) -> ir.Value:
    """Adds the router on states [.., D'] to `tape`: its score [.., 1]. `router`: down, up and bias; `shortlist`: its
    weights and the confidence's, or none."""
    down, up, bias = router
    z = tape.op("MatMul", [states, down])
    if shortlist:
        logits = tape.op("MatMul", [states, shortlist[0]])
        two = tape.op("Constant", [], {"value_ints": [2]})
        summary, _ = tape.op_multi_out(
            "TopK", [tape.op("LogSoftmax", [logits], {"axis": -1}), two], {"axis": -1}, num_outputs=2
        )
        z = tape.op("Add", [z, tape.op("MatMul", [summary, shortlist[1]])])
    z = tape.op("Mul", [z, tape.op("Sigmoid", [z])])
    return tape.op("Sigmoid", [tape.op("Add", [tape.op("MatMul", [z, up]), bias])])


def named(tape: ir.tape.Tape) -> list[ir.Node]:
    """The nodes of `tape`, a function's body: with names, and without types, because any caller's fit."""
    nodes = list(tape.nodes)
    for number, node in enumerate(nodes):
        node.name = f"{node.op_type}_{number}"
        for index, value in enumerate(node.outputs):
            value.name, value.type, value.shape = f"{node.name}_out_{index}", None, None
    return nodes
