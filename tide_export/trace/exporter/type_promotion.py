"""Lets the exporter's type promotion read results off the captured graph instead of running it.

`torch.onnx.export` makes the casts that PyTorch's operators do inside explicit, and runs every node on symbolic shapes
for that: a fifth of a trace. Nodes that it changes are run; every other node carries its result.
"""

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from torch.fx import Interpreter, Node
from torch.onnx._internal.fx.passes.type_promotion import _TypePromotionInterpreter, get_type_promotion_rule


def known_results() -> AbstractContextManager[Any]:
    """While open, nodes that need no promotion are not run."""
    return patch.object(_TypePromotionInterpreter, "run_node", _run_node)


def _run_node(interpreter: _TypePromotionInterpreter, node: Node) -> Any:
    """Promotes the inputs of `node` and returns its result."""
    with interpreter._set_current_node(node):
        if rule := get_type_promotion_rule(node, interpreter.type_promotion_table):
            interpreter._maybe_promote_node(node, rule)
    if node.op == "call_function" and node.meta.get("val") is not None:
        return node.meta["val"]
    return Interpreter.run_node(interpreter, node)
