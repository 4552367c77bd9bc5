"""Defines a checkpoint of the step graph as a `tide::TideCandidate` function: last token, lens, final norm, router.

The library in `cpp/ops` has an operator of that name, which computes nothing where no score could exit or skip. Where
it is not registered, ONNX Runtime inlines the function, which computes the score in any case.
"""

import onnx_ir as ir

from tide_export.compose.exit_op import add_exit_state, add_score_of, function_of, input_values


def candidate_function(call: ir.Node, opset: int) -> ir.Function:
    """The function that `call` calls.

    TideCandidate(states [1, n, D'], threshold [1], down [D', R], up [R, 1], bias [1], ...) -> candidate [1, D'], score
    [1, 1], exits bool [1, 1]: of the last token, the state that the head would read, its score, and whether that is
    above the threshold (never for NaN). The inputs that follow and the attributes are those of `exit_function`. The
    operator does not compute a score that is compared with a threshold above 1: it is NaN, and the candidate zero.
    """
    inputs = input_values(call, ["states", "threshold"])
    tape = ir.tape.Tape()
    last = tape.op("Constant", [], {"value_int": -1})
    state = tape.op("Gather", [inputs["states"], last], {"axis": 1})
    state = add_exit_state(tape, call, state, inputs)
    score = add_score_of(tape, state, inputs)
    exits = tape.op("Greater", [score, inputs["threshold"]])
    return function_of(call, tape, inputs, {"candidate": state, "score": score, "exits": exits}, opset)
