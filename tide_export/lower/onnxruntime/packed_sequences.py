"""Replaces one sequence's attention by those of several, whose tokens are concatenated on one axis.

For the networks of a batch. The operator takes several sequences with one new token each, or one with several; a step
over a batch has any number of each. So there is one operator per slot of the batch, on its slice of the packed queries,
keys and values and its K/V buffers, inside an `If`: a slot without tokens costs a few microseconds, and sequences may
join and leave between runs without a copy. An attention to an earlier layer's keys and values reads that layer's
buffers, per slot.
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from tide_export import names
from tide_export.trace.rewriting import (
    BOOL,
    FLOAT,
    INT32,
    INT64,
    OutputType,
    constant,
    dims,
    integers,
    last_dim,
    new_node,
    nodes_of,
    op_before,
    ops_before,
    present,
    typed_value,
)

PAST, TOTAL, BIAS = 3, 6, 10  # inputs of GroupQueryAttention, and of the operators in its place


class PackedSequencesPass(ir.passes.InPlacePass):
    """Replaces the graph's inputs for one sequence (past buffers and total length) by one past buffer per slot
    (`names.slot`) and all slots' tokens (int64 [R]) and lengths (int32 [R]); present outputs likewise. A bias input
    (ALiBi) is the model's table [H, N]."""

    def __init__(self, slots: int):
        """`slots`: sequences of a batch, R."""
        super().__init__()
        self.slots = slots

    def requires(self, model: ir.Model) -> None:
        if not {names.TOTAL_LENGTH} <= {value.name for value in model.graph.inputs}:
            raise ir.passes.PreconditionError("the graph has no length of one sequence to replace")
        if nodes_of(model.graph, names.OP_ATTENTION, names.DOMAIN):
            raise ir.passes.PreconditionError("sequences are packed after attention is lowered")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        attentions = names.OP_CACHED_ATTENTION.values()
        nodes = [node for name in attentions for node in nodes_of(model.graph, name, names.DOMAIN)]
        if nodes:
            _Slots(model.graph, self.slots).lower(nodes)
        return ir.passes.PassResult(model, modified=bool(nodes))


class _Slots:
    """The values that all attentions of a model share, one per slot."""

    def __init__(self, graph: ir.Graph, slots: int):
        self.graph, self.slots = graph, slots
        self.tokens = typed_value(names.SLOT_TOKENS, INT64, [slots])
        lengths = typed_value(names.SLOT_LENGTHS, INT32, [slots])
        self.inputs = [self.tokens, lengths]
        one = constant(graph, "one_int32", np.array([1], dtype=np.int32))
        zero = integers(graph, "zero_int64", [0])
        first = graph[0]

        def per_slot(value: ir.Value, dtype: ir.DataType, suffix: str) -> list[ir.Value]:
            types, attributes = [(dtype, [1])] * slots, {"axis": 0, "num_outputs": slots}
            return ops_before(first, "Split", [value], attributes, types=types, suffix=suffix)

        last = op_before(first, "Sub", [lengths, one], dtype=INT32, shape=[slots], suffix="_last")
        active = op_before(first, "Greater", [self.tokens, zero], dtype=BOOL, shape=[slots], suffix="_active")
        self.total = per_slot(lengths, INT32, "_total")
        self.last = per_slot(last, INT32, "_last")
        self.buffers: dict[ir.Value, list[ir.Value]] = {}  # every K/V buffer's, past and present, per slot
        self.active = per_slot(active, BOOL, "_active")

    def lower(self, attentions: list[ir.Node]) -> None:
        for node in attentions:
            self._attention(node)
        replaced = {names.TOTAL_LENGTH} | {value.name for value in self.buffers}
        self.graph.inputs[:] = [*(value for value in self.graph.inputs if value.name not in replaced), *self.inputs]
        outputs = [self.buffers.get(value, [value]) for value in self.graph.outputs]
        self.graph.outputs[:] = [value for values in outputs for value in values]
        self.graph.remove(attentions[::-1], safe=True)

    def _attention(self, node: ir.Node) -> None:
        """Adds all slots' attentions before `node`, and their present keys and values to `buffers`."""
        inputs = [self._split(node, index) for index in range(3)]
        buffers = [self._buffers(present(value)) for value in node.inputs[PAST : PAST + 2]]
        width = last_dim(node.outputs[0]) or 0
        results = list[ir.Value]()
        presents: list[list[ir.Value]] = [[] for _ in node.outputs[1:]]
        for slot in range(self.slots):
            pasts = [values[slot] for values in buffers]
            types = [(FLOAT, [1, None, width]), *((value.dtype, value.shape) for value in pasts[: len(presents)])]
            name = f"{node.name}/slot_{slot}"
            branches = {
                "then_branch": self._run(node, slot, f"{name}/run", [values[slot] for values in inputs], pasts, types),
                "else_branch": self._skip(f"{name}/skip", pasts[: len(presents)], width),
            }
            result, *slot_presents = ops_before(
                node, "If", [self.active[slot]], branches, types=types, suffix=f"_{slot}"
            )
            results.append(result)
            for values, old, new in zip(presents, node.outputs[1:], slot_presents, strict=True):
                new.name = names.slot(str(old.name), slot)
                values.append(new)
        output = node.outputs[0]
        joined = op_before(node, "Concat", results, {"axis": 1}, dtype=FLOAT, shape=output.shape)
        output.replace_all_uses_with(joined, replace_graph_outputs=True)
        self.buffers |= dict(zip(node.outputs[1:], presents, strict=True))

    def _buffers(self, buffer: ir.Value) -> list[ir.Value]:
        """Each slot's `buffer`: as an attention before has written it, or a new input of the graph."""
        if buffer not in self.buffers:
            self.buffers[buffer] = [_slot_buffer(buffer, slot) for slot in range(self.slots)]
            self.inputs += self.buffers[buffer]
        return self.buffers[buffer]

    def _split(self, node: ir.Node, index: int) -> Sequence[ir.Value | None]:
        """Each slot's slice of an input [1, N, W]; the input itself for all if it is absent or has no tokens."""
        value = node.inputs[index]
        if value is None or value.is_initializer():
            return [value] * self.slots
        types = [(FLOAT, [1, None, last_dim(value)])] * self.slots
        return ops_before(node, "Split", [value, self.tokens], {"axis": 1}, types=types, suffix=f"_{index}")

    def _run(
        self, node: ir.Node, slot: int, name: str, slices: list, pasts: list[ir.Value], types: Sequence[OutputType]
    ) -> ir.Graph:
        nodes: list[ir.Node] = []
        inputs = [*slices, *pasts, self.last[slot], self.total[slot], *node.inputs[TOTAL + 1 :]]
        if len(inputs) > BIAS and inputs[BIAS] is not None:
            queries = next(value for value in slices if value is not None)
            nodes, inputs[BIAS] = self._bias(name, inputs[BIAS], queries, slot)
        attributes = dict(node.attributes)
        attention = new_node(node.op_type, inputs, attributes, name=name, domain=node.domain, outputs=types)
        return ir.Graph([], attention.outputs, nodes=[*nodes, attention], name=name)

    def _bias(self, prefix: str, table: ir.Value, slices: ir.Value, slot: int) -> tuple[list[ir.Node], ir.Value]:
        """The bias [1, H, n, T] of a slot's n tokens at length T (`compose.alibi` does the same for one sequence)."""
        nodes: list[ir.Node] = []

        def op(op_type: str, inputs: list, attributes: dict | None = None, dtype: ir.DataType = INT64) -> ir.Value:
            name = f"{prefix}/{op_type}_{len(nodes)}"
            nodes.append(new_node(op_type, inputs, attributes, name=name, outputs=[(dtype, None)]))
            return nodes[-1].outputs[0]

        zero, one = integers(self.graph, "axis_0", [0]), integers(self.graph, "axis_1", [1])
        axes = integers(self.graph, "axes_0_2", [0, 2])
        stop = op("Cast", [self.total[slot]], {"to": INT64.value})
        keys = op("Slice", [table, zero, stop, one], dtype=FLOAT)
        last = op("Slice", [table, op("Sub", [stop, one]), stop, one], dtype=FLOAT)
        relative = op("Unsqueeze", [op("Sub", [keys, last], dtype=FLOAT), axes], dtype=FLOAT)
        count = op("Shape", [slices], {"start": 1, "end": 2})
        shape = op("Concat", [one, one, count, one], {"axis": 0})
        return nodes, op("Expand", [relative, shape], dtype=FLOAT)

    def _skip(self, name: str, pasts: list[ir.Value], width: int) -> ir.Graph:
        """No tokens, and the buffers unchanged: bound to the same memory, nothing is copied."""
        none = constant(self.graph, f"no_tokens_{width}", np.zeros((1, 0, width), dtype=np.float32))
        nodes = [
            new_node("Identity", [value], name=f"{name}_{index}", outputs=[(value.dtype, value.shape)])
            for index, value in enumerate([none, *pasts])
        ]
        return ir.Graph([], [node.outputs[0] for node in nodes], nodes=nodes, name=name)


def _slot_buffer(buffer: ir.Value, slot: int) -> ir.Value:
    """The past buffer of a slot, whose capacity is independent of the others'."""
    _, kv_heads, _, head_dim = dims(buffer)
    shape = [1, kv_heads, f"capacity_{slot}", head_dim]
    return typed_value(names.slot(str(buffer.name), slot), present(buffer.dtype), shape)
