"""Lets the exporter's rewrite rules pass over nodes whose operator is not the one that their pattern ends in.

A rule whose pattern has several outputs lists all nodes of the graph by operator before it looks at a node: for every
node, so the work grows with the square of the graph. It took a fifth of a trace of 12 layers.
"""

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import onnx_ir as ir
from onnxscript.rewriter._basics import MatchResult
from onnxscript.rewriter._matcher import SimplePatternMatcher

match = SimplePatternMatcher.match


def early_mismatches() -> AbstractContextManager[Any]:
    """While open, the operator of a node is compared first."""
    return patch.object(SimplePatternMatcher, "match", _match)


def _match(matcher: SimplePatternMatcher, model: Any, graph: Any, node: ir.Node, **options: Any) -> MatchResult:
    last = matcher.pattern.output_nodes[0]
    if last.op.matches(node.op_type) and last.domain.matches(node.domain):
        return match(matcher, model, graph, node, **options)
    return MatchResult().fail(f"{node.op_type} is not {last.op}")
