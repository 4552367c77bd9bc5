"""Counts what a graph holds, to say what a pass has changed in it."""

from collections import Counter

import onnx_ir as ir


class Contents:
    """Counts of what a model holds: nodes by operator, initializers by type, functions and opset imports.

    Attributes:
        counts: how many of each, by its name; nodes of branches count, those of functions do not.
        inputs: what each node reads.
    """

    def __init__(self, model: ir.Model):
        self.inputs = {node: node.inputs for node in model.graph.all_nodes()}
        self.counts = Counter(f"{node.domain}::{node.op_type}".removeprefix("::") for node in self.inputs)
        self.counts.update(f"{value.dtype} initializer" for value in model.graph.initializers.values())
        self.counts.update(function=len(model.functions), opset=len(model.graph.opset_imports))

    def since(self, before: "Contents") -> str:
        """Says what there is more or less of than `before`, such as "-4 Add, +4 Sub"."""
        changes = {name: self.counts[name] - before.counts[name] for name in sorted(self.counts | before.counts)}
        said = ", ".join(f"{change:+} {name}" for name, change in changes.items() if change)
        changed = sum(inputs != before.inputs.get(node) for node, inputs in self.inputs.items())
        return said or f"as many nodes of each operator, other inputs of {changed}"
