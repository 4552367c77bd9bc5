"""One sequence's GroupQueryAttention becomes that of several, whose tokens lie behind one another on one axis.

For networks of a batch (`lower.onnxruntime.packed`). The operator takes several sequences with one new token each, or
one with several; a step over a batch has any number of each. So there is one operator per row of the batch, on its own
stretch of the packed queries, keys and values and on its own K/V buffers, inside an `If`: a row without tokens costs a
few microseconds, and rows may come and go between runs without a copy.

Precondition: `GroupQueryAttentionPass` ran; the graph's inputs are those of one sequence, past buffers and total length
among them; a bias input (ALiBi) is the model's table [H, N].
Postcondition: these inputs and the present outputs are there once per row (`names.row`), and instead of the total
length the rows' tokens (int64 [R]) and lengths (int32 [R]).
"""

import numpy as np
import onnx_ir as ir

from tide_export import names
from tide_export.lower.rewriting import constant, last_dim, nodes_of

FLOAT, INT32, INT64, BOOL = ir.DataType.FLOAT, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.BOOL
PAST, LAST_INDEX, TOTAL, BIAS = 3, 5, 6, 10  # inputs of GroupQueryAttention


class PackedRowsPass(ir.passes.InPlacePass):
    def __init__(self, rows: int):
        """`rows`: of a batch at most."""
        super().__init__()
        self.rows = rows

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = nodes_of(model, "GroupQueryAttention", "com.microsoft")
        if not nodes:
            return ir.passes.PassResult(model, modified=False)
        _Rows(model, self.rows).lower(nodes)
        return ir.passes.PassResult(model, modified=True)


class _Rows:
    """The values that all attentions of a model share, one per row."""

    def __init__(self, model: ir.Model, rows: int):
        self.model, self.rows = model, rows
        self.tokens = _value(names.SLOT_TOKENS, INT64, [rows])
        lengths = _value(names.SLOT_LENGTHS, INT32, [rows])
        self.inputs = [self.tokens, lengths]
        one = constant(model, "one_int32", np.array([1], dtype=np.int32))
        none = constant(model, "zero_int64", np.array([0], dtype=np.int64))
        nodes: list[ir.Node] = []

        def add(op: str, inputs: list, name: str, kinds: list, attributes: dict | None = None) -> list[ir.Value]:
            node = _node(op, inputs, f"rows/{name}", kinds, attributes)
            nodes.append(node)
            return list(node.outputs)

        def per_row(value: ir.Value, name: str, dtype: ir.DataType) -> list[ir.Value]:
            attributes = {"axis": 0, "num_outputs": rows}
            return add("Split", [value], name, [(dtype, [1])] * rows, attributes)

        (last,) = add("Sub", [lengths, one], "last_indices", [(INT32, [rows])])
        (active,) = add("Greater", [self.tokens, none], "active", [(BOOL, [rows])])
        self.total = per_row(lengths, "total", INT32)
        self.last = per_row(last, "last", INT32)
        self.active = per_row(active, "has_tokens", BOOL)
        model.graph.insert_before(model.graph[0], nodes)

    def lower(self, attentions: list[ir.Node]) -> None:
        presents: dict[str, list[ir.Value]] = {}
        replaced: set[str] = {names.TOTAL_LENGTH}
        for node in attentions:
            replaced |= {str(value.name) for value in node.inputs[PAST : PAST + 2] if value is not None}
            given = self._attention(node)
            for old, rows in zip(node.outputs[1:], given, strict=True):
                presents[str(old.name)] = rows
        graph = self.model.graph
        kept = [value for value in graph.inputs if value.name not in replaced]
        graph.inputs[:] = [*kept, *self.inputs]
        outputs = [[value] if value.name not in presents else presents[str(value.name)] for value in graph.outputs]
        graph.outputs[:] = [value for values in outputs for value in values]
        graph.remove(attentions, safe=True)

    def _attention(self, node: ir.Node) -> tuple[list[ir.Value], list[ir.Value]]:
        """Writes all rows' attentions before `node`; gives the rows' keys and values afterwards."""
        graph, name = self.model.graph, str(node.name)
        stretches = [self._split(node, index) for index in range(3)]
        buffers = [value for value in node.inputs[PAST : PAST + 2] if value is not None]
        width = last_dim(node.outputs[0])
        mixed = list[ir.Value]()
        presents: tuple[list[ir.Value], list[ir.Value]] = ([], [])
        for row in range(self.rows):
            pasts = [_value(names.slot(str(value.name), row), FLOAT, _row_shape(value, row)) for value in buffers]
            self.inputs += pasts
            branches = {
                "then_branch": self._run(node, row, [stretch[row] for stretch in stretches], pasts),
                "else_branch": self._skip(node, row, pasts, width),
            }
            kinds = [(FLOAT, [1, None, width]), *((FLOAT, value.shape) for value in pasts)]
            choice = _node("If", [self.active[row]], f"{name}/row_{row}", kinds, branches)
            graph.insert_before(node, choice)
            mixed.append(choice.outputs[0])
            for values, old, new in zip(presents, node.outputs[1:], choice.outputs[1:], strict=True):
                new.name = names.slot(str(old.name), row)
                values.append(new)
        shape = node.outputs[0].shape
        joined = _node("Concat", mixed, f"{name}/rows", [(FLOAT, shape)], {"axis": 1})
        graph.insert_before(node, joined)
        node.outputs[0].replace_all_uses_with(joined.outputs[0], replace_graph_outputs=True)
        return presents

    def _split(self, node: ir.Node, index: int) -> list[ir.Value | None]:
        """Each row's stretch of an input [1, N, W], None throughout where the attention has no such input."""
        value = node.inputs[index]
        if value is None:
            return [None] * self.rows
        width = last_dim(value)
        kinds = [(FLOAT, [1, None, width])] * self.rows
        split = _node("Split", [value, self.tokens], f"{node.name}/split_{index}", kinds, {"axis": 1})
        self.model.graph.insert_before(node, split)
        return list(split.outputs)

    def _run(self, node: ir.Node, row: int, stretches: list, pasts: list[ir.Value]) -> ir.Graph:
        nodes: list[ir.Node] = []
        inputs = [*stretches, *pasts, self.last[row], self.total[row], *node.inputs[TOTAL + 1 :]]
        prefix = f"{node.name}/row_{row}/run"
        if len(inputs) > BIAS and inputs[BIAS] is not None:
            first = next(value for value in stretches if value is not None)
            nodes, inputs[BIAS] = self._bias(prefix, inputs[BIAS], first, row)
        kinds = [(FLOAT, [1, None, last_dim(node.outputs[0])]), *((FLOAT, value.shape) for value in pasts)]
        attention = _node("GroupQueryAttention", inputs, prefix, kinds, dict(node.attributes), "com.microsoft")
        return ir.Graph([], attention.outputs, nodes=[*nodes, attention], name=prefix)

    def _bias(self, prefix: str, table: ir.Value, stretch: ir.Value, row: int) -> tuple[list[ir.Node], ir.Value]:
        """The bias [1, H, n, T] of a row's n tokens at length T (`compose.alibi` does the same for one sequence)."""
        nodes: list[ir.Node] = []

        def op(name: str, inputs: list, attributes: dict | None = None, dtype: ir.DataType = INT64) -> ir.Value:
            nodes.append(_node(name, inputs, f"{prefix}/{name}_{len(nodes)}", [(dtype, None)], attributes))
            return nodes[-1].outputs[0]

        def numbers(name: str, values: list[int]) -> ir.Value:
            return constant(self.model, name, np.array(values, dtype=np.int64))

        zero, one = numbers("axis_0", [0]), numbers("axis_1", [1])
        stop = op("Cast", [self.total[row]], {"to": INT64.value})
        keys = op("Slice", [table, zero, stop, one], dtype=FLOAT)
        last = op("Slice", [table, op("Sub", [stop, one]), stop, one], dtype=FLOAT)
        relative = op("Unsqueeze", [op("Sub", [keys, last], dtype=FLOAT), numbers("axes_0_2", [0, 2])], dtype=FLOAT)
        count = op("Shape", [stretch], {"start": 1, "end": 2})
        shape = op("Concat", [one, one, count, one], {"axis": 0})
        return nodes, op("Expand", [relative, shape], dtype=FLOAT)

    def _skip(self, node: ir.Node, row: int, pasts: list[ir.Value], width: int | None) -> ir.Graph:
        """Nothing, and the buffers as they are: bound to the same memory, copied nowhere."""
        prefix = f"{node.name}/row_{row}/skip"
        nothing = constant(self.model, f"no_tokens_{width}", np.zeros((1, 0, int(width or 0)), dtype=np.float32))
        nodes = [
            _node("Identity", [value], f"{prefix}_{index}", [(FLOAT, value.shape)])
            for index, value in enumerate([nothing, *pasts])
        ]
        return ir.Graph([], [copy.outputs[0] for copy in nodes], nodes=nodes, name=prefix)


def _row_shape(buffer: ir.Value, row: int) -> list:
    """A row's buffers have a length of their own."""
    assert buffer.shape is not None
    return [1, buffer.shape[1], f"capacity_{row}", buffer.shape[3]]


def _value(name: str, dtype: ir.DataType, shape: list) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def _node(op: str, inputs: list, name: str, kinds: list, attributes: dict | None = None, domain: str = "") -> ir.Node:
    """A node whose outputs have the given (dtype, shape)."""
    node = ir.node(op, inputs, attributes=attributes or {}, domain=domain, num_outputs=len(kinds), name=name)
    for index, (value, (dtype, shape)) in enumerate(zip(node.outputs, kinds, strict=True)):
        value.name = f"{name}.{index}"
        value.type = ir.TensorType(dtype) if dtype is not None else None
        value.shape = ir.Shape(shape) if shape is not None else None
    return node
