"""Defines a checkpoint as a `tide::TideCandidate` function: last tokens, lens, final norm, router.

The step graph calls it for its one sequence, the networks of a batch for all of theirs.

The library in `cpp/ops` has an operator of that name, which computes nothing for a token that could neither exit
nor skip. Where it is not registered, ONNX Runtime inlines the function, which computes all scores in any case.
"""

from collections.abc import Sequence

import onnx_ir as ir

from tide_export.compose.exit_op import add_exit_state, add_score, function_of, input_values
from tide_export.graph.builder import GraphBuilder, Weights
from tide_export.names.operators import DOMAIN


def checkpoint_functions(nodes: Sequence[ir.Node], opset: int) -> list[ir.Function]:
    """Returns the functions that those of `nodes` call which are checkpoints."""
    calls = {node.op_type: node for node in nodes if node.domain == DOMAIN}
    return [checkpoint_function(call, opset) for call in calls.values()]


def checkpoint_function(call: ir.Node, opset: int) -> ir.Function:
    """The function that `call` calls.

    TideCandidate(states [1, n, D'], last_tokens [m], thresholds [m, 1], down [D', R], up [R, 1], bias [1], ...) ->
    exit_state [m, D'], score [m, 1], exits bool [m, 1]: of each of the `last_tokens` (indices into the n; -1 is the
    last), what the head would read, its score, and whether that is above its threshold (never for NaN). The
    inputs that follow and the attributes are those of `exit_function`. The operator does not compute a score that is
    compared with a threshold above 1: it is NaN, and the exit state zero.
    """
    inputs = input_values(call, ["states", "last_tokens", "thresholds"])
    body = GraphBuilder(call.op_type, Weights())
    rows = body.op("Squeeze", [inputs["states"], body.op("Constant", [], {"value_ints": [0]})])
    hidden = body.op("Gather", [rows, inputs["last_tokens"]], {"axis": 0})
    hidden = add_exit_state(body, call, hidden, inputs)
    score = add_score(body, hidden, inputs)
    exits = body.op("Greater", [score, inputs["thresholds"]])
    return function_of(call, body, inputs, {"exit_state": hidden, "score": score, "exits": exits}, opset)
