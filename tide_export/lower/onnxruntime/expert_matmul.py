"""Replaces `tide::TideExpertMatMul`, the product of each token's rows with the experts that it chose.

Weights in 16 bits, and integers whose products round their inputs to 8 bits, are multiplied by one operator of
`cpp/ops`, which holds the matrices of all experts one after the other and reads those that some token chose. The
operators (`TideBf16ExpertMatMul`, `TideInt4ExpertMatMul`, ..; `TideMxfp4ExpertMatMul`, whose function multiplies by
integers of 8 bits) are also model-local functions, which ONNX Runtime inlines where the library is not registered or
the CPU lacks the instructions.

The functions, and what takes the place of any other product (float32, zero points), sort rows by expert, split them
where the next expert's begin, multiply each part, concatenate and put the rows back in order. An expert that no row
chose multiplies nothing and its weights are not read.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from tide_export.bundle.manifest import INT8_MATMULS, Quantization
from tide_export.graph.builder import OPSET, GraphBuilder, Weights
from tide_export.graph.rewriting import (
    FLOAT,
    HALF,
    INT64,
    derived_weight,
    ensure_none_left,
    graph_of,
    is_weight,
    nodes_of,
    op_before,
    replace_value,
    require_arity,
    required,
    static_dim,
)
from tide_export.lower.onnxruntime.half_weights import is_exact_in, narrowed
from tide_export.lower.onnxruntime.quantized_matmuls import add_matmul_functions
from tide_export.model.fp4_matrices import E2M1, EXPONENT_BIAS, Mxfp4Matrix
from tide_export.model.quantized_weights import Fp8Matrix, IntegerMatrix
from tide_export.names.operators import (
    DOMAIN,
    OP_EXPERT_MATMUL,
    OP_HALF_EXPERTS,
    OP_HALF_MATMUL,
    OP_INTEGER_EXPERTS,
    OP_INTEGER_MATMUL,
    OP_MXFP4_EXPERTS,
    OP_QUANTIZED_MATMUL,
    WEIGHTS_METADATA,
)

UINT8 = ir.DataType.UINT8
INTEGER_ATTRIBUTES = ("K", "N", "bits", "block_size", "accuracy_level")

Product = Callable[[GraphBuilder, ir.Value, int], ir.Value]  # of rows [R, K] and the matrix of an expert: [R, N]


class ExpertMatMulPass(ir.passes.InPlacePass):
    """Replaces every node.

    Inputs of a node: rows [T, c, K], experts int64 [T, k], where c is k or 1, and stored weights [E, N, K] (or
    [E, K, N] where `transposed`); quantized weights are not an input but named in the attribute `weights`, with their N
    in `width`. T may be several axes.
    """

    def __init__(
        self,
        blocks: Mapping[str, IntegerMatrix | Fp8Matrix] | None = None,
        settings: Quantization | None = None,
        half: str | None = None,
    ):
        """Takes the quantized matrices by name, how they were quantized, and "bf16" or "fp16" for all others."""
        super().__init__()
        self.blocks, self.settings, self.half = blocks or {}, settings, half

    def requires(self, model: ir.Model) -> None:
        require_arity(model, OP_EXPERT_MATMUL, inputs=(2, 3))
        for node in nodes_of(model.graph, OP_EXPERT_MATMUL, DOMAIN):
            if not all(is_weight(weights, 3) for weights in node.inputs[2:]):
                raise ir.passes.PreconditionError(f"the expert weights of {node.name} are not stored tensors")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = nodes_of(model.graph, OP_EXPERT_MATMUL, DOMAIN)
        for node in nodes:
            self._lower(model, node)
        return ir.passes.PassResult(model, modified=bool(nodes))

    def ensures(self, model: ir.Model) -> None:
        ensure_none_left(nodes_of(model.graph, OP_EXPERT_MATMUL, DOMAIN))

    def _lower(self, model: ir.Model, node: ir.Node) -> None:
        weights = node.inputs[2] if len(node.inputs) > 2 else None
        if weights is None:
            matrices = self._matrices(node)
            if matrices is None:
                _expand(model.graph, node, _quantized_product(node))
            else:
                self._integers(model, node, matrices)
        elif self.half is not None and is_exact_in(HALF[self.half].numpy(), required(weights.const_value)):
            self._halves(model, node, weights, HALF[self.half])
        else:
            _expand(model.graph, node, _float_product(model.graph, node, weights))

    def _matrices(self, node: ir.Node) -> list[IntegerMatrix] | None:
        """Returns the matrices of all experts; None: the operator does not multiply by such ones."""
        (name,), count = node.attributes["weights"].as_strings(), node.attributes["num_experts"].as_int()
        matrices = [self.blocks[f"{name}.{index}"] for index in range(count)]
        integers = [matrix for matrix in matrices if not isinstance(matrix, Fp8Matrix) and matrix.symmetric]
        rounded = self.settings is not None and self.settings.accuracy_level == INT8_MATMULS
        return integers if rounded and len(integers) == count else None

    def _integers(self, model: ir.Model, node: ir.Node, matrices: Sequence[IntegerMatrix]) -> None:
        (name,), first, graph = node.attributes["weights"].as_strings(), matrices[0], model.graph
        mxfp4 = all(isinstance(matrix, Mxfp4Matrix) for matrix in matrices)
        bits = 4 if mxfp4 else first.bits
        shape = [len(matrices), first.rows, -(-first.columns // first.block_size)]

        def stored(kind: str, field: str, dtype: ir.DataType, *rest: int) -> ir.Value:
            def stacked() -> np.ndarray:
                return np.stack([getattr(matrix, field) for matrix in matrices])

            return derived_weight(graph, f"{name}.{kind}", [*shape, *rest], dtype, stacked)

        packed = stored("blocks", "codes" if mxfp4 else "packed", UINT8, first.block_size * bits // 8)
        scales = stored("scales", "exponents" if mxfp4 else "scales", UINT8 if mxfp4 else FLOAT)
        attributes = {
            "K": first.columns,
            "N": first.rows,
            "bits": bits,
            "block_size": first.block_size,
            "accuracy_level": required(self.settings).accuracy_level,
        }
        op = OP_MXFP4_EXPERTS if mxfp4 else OP_INTEGER_EXPERTS[OP_INTEGER_MATMUL[bits]]
        overload = self._add_function(model, op, len(matrices))
        value = _replace(node, op, overload, [packed, scales], attributes)
        names = [f"{name}.{index}" for index in range(len(matrices))]
        required(value.producer()).metadata_props[WEIGHTS_METADATA] = "\n".join(names)

    def _halves(self, model: ir.Model, node: ir.Node, weights: ir.Value, dtype: ir.DataType) -> None:
        experts, *matrix = (static_dim(weights, axis) for axis in range(3))
        transposed = bool(node.attributes["transposed"].as_int())
        stored = derived_weight(
            model.graph,
            f"{weights.name}.{self.half}",
            [experts, *(matrix[::-1] if transposed else matrix)],
            dtype,
            narrowed(weights, dtype, transposed),
        )
        op = OP_HALF_EXPERTS[OP_HALF_MATMUL[required(self.half)]]
        _replace(node, op, self._add_function(model, op, experts), [stored], {})

    def _add_function(self, model: ir.Model, op: str, experts: int) -> str:
        """Adds the function of `op` for so many experts.

        Returns its overload: the number of experts, but for those that the first one found has.
        """
        function = expert_matmul_function(op, experts, OPSET)
        first = model.functions.get((DOMAIN, op, ""))
        if first is not None and first.metadata_props != function.metadata_props:
            function.overload = str(experts)
        model.functions.setdefault(function.identifier(), function)
        add_matmul_functions(model, [node.op_type for node in function if node.domain == DOMAIN], OPSET)
        return function.overload


def expert_matmul_function(op: str, experts: int, opset: int = OPSET) -> ir.Function:
    """Defines `op` by matmuls of sorted rows.

    Inputs: x [.., c, K], experts [.., k], the weights of all experts; output: y [.., k, N].
    """
    half = op in OP_HALF_EXPERTS.values()
    names = ["x", "experts", "weights"] if half else ["x", "experts", "integers", "scales"]
    inputs = [ir.Value(name=name) for name in names]
    matmul = OP_INTEGER_MATMUL[8] if op == OP_MXFP4_EXPERTS else op.replace("ExpertMatMul", "MatMul")
    references = {} if half else {name: ir.RefAttr(name, name, ir.AttributeType.INT) for name in INTEGER_ATTRIBUTES}
    body = GraphBuilder(op, Weights())

    def product(body: GraphBuilder, rows: ir.Value, expert: int) -> ir.Value:
        number = body.op("Constant", [], {"value_int": expert})
        matrix = [body.op("Gather", [weights, number], {"axis": 0}) for weights in inputs[2:]]
        if op != OP_MXFP4_EXPERTS:
            return body.op(matmul, [rows, *matrix], references, domain=DOMAIN)
        return body.op(matmul, [rows, *_doubled(body, *matrix)], references | {"bits": 8}, domain=DOMAIN)

    def constant(numbers: list[int]) -> ir.Value:
        return body.op("Constant", [], {"value_ints": numbers})

    y = _sorted_products(body, constant, inputs[0], inputs[1], experts, product)
    attributes = [ir.Attr(name, ir.AttributeType.INT, None) for name in references]
    function = body.function(op, inputs, {"y": y}, opset, attributes)
    function.opset_imports[DOMAIN] = 1
    function.metadata_props["experts"] = str(experts)
    return function


def _doubled(body: GraphBuilder, codes: ir.Value, exponents: ir.Value) -> list[ir.Value]:
    """Adds the nodes of twice the numbers of a matrix in MXFP4, plus 128, and of half its scales."""

    def number(value: int, dtype: ir.DataType) -> ir.Value:
        return body.op("Constant", [], {"value": ir.tensor(np.array(value, dtype.numpy()))})

    axis, four = number(-1, INT64), number(4, UINT8)
    halves = [
        body.op("BitwiseAnd", [codes, number(15, UINT8)]),
        body.op("BitShift", [codes, four], {"direction": "RIGHT"}),
    ]
    pairs = body.op("Concat", [body.op("Unsqueeze", [half, axis]) for half in halves], {"axis": -1})
    shape = body.op("Constant", [], {"value_ints": [0, 0, -1]})
    every = body.op("Cast", [body.op("Reshape", [pairs, shape])], {"to": INT64.value})
    table = body.op("Constant", [], {"value": ir.tensor((2 * E2M1 + 128).astype(np.uint8))})
    biased = body.op("Cast", [exponents], {"to": FLOAT.value})
    power = body.op("Sub", [biased, number(EXPONENT_BIAS + 1, FLOAT)])
    return [body.op("Gather", [table, every]), body.op("Pow", [number(2, FLOAT), power])]


def _replace(
    node: ir.Node, op: str, overload: str, weights: Sequence[ir.Value], attributes: Mapping[str, int]
) -> ir.Value:
    old = node.outputs[0]
    inputs = [*node.inputs[:2], *weights]
    value = op_before(node, op, inputs, attributes, domain=DOMAIN, dtype=old.dtype, shape=old.shape)
    required(value.producer()).overload = overload
    replace_value(old, value)
    return value


def _expand(graph: ir.Graph, node: ir.Node, product: Product) -> None:
    """Replaces `node` by the nodes of `_sorted_products`."""
    pool, old = Weights(), node.outputs[0]
    body = GraphBuilder(str(node.name), pool)

    def constant(numbers: list[int]) -> ir.Value:
        name = "_".join(["numbers", *map(str, numbers)]) if len(numbers) < 3 else f"experts_{len(numbers)}"
        if name not in pool.values:
            pool.values[name] = graph.initializers.get(name) or pool.integers(name, numbers)
        return pool.values[name]

    count = node.attributes["num_experts"].as_int()
    y = _sorted_products(body, constant, required(node.inputs[0]), required(node.inputs[1]), count, product)
    y.type, y.shape = old.type, old.shape
    for name, value in pool.values.items():
        if name not in graph.initializers:
            graph.register_initializer(value)
    graph_of(node).insert_before(node, body.nodes)
    replace_value(old, y)


def _sorted_products(
    body: GraphBuilder,
    constant: Callable[[list[int]], ir.Value],
    x: ir.Value,
    experts: ir.Value,
    count: int,
    product: Product,
) -> ir.Value:
    """Adds the nodes of the product of x [.., c, K] with those `experts` [.., k] of `count`.

    Returns y [.., k, N].

    Args:
        constant: adds int64 numbers [n].
    """
    rest = constant([-1])
    width, choices = body.op("Shape", [x], {"start": -1}), body.op("Shape", [experts])
    every = body.op("Expand", [x, body.op("Concat", [choices, width], {"axis": 0})])
    rows = body.op("Reshape", [every, body.op("Concat", [rest, width], {"axis": 0})])
    expert = body.op("Reshape", [experts, rest])
    length = body.op("Shape", [expert])
    ascending, two = {"axis": 0, "largest": 0, "sorted": 1}, [(None, None)] * 2
    _, order = body.ops("TopK", [expert, length], ascending, types=two)  # the row at each sorted position
    _, inverse = body.ops("TopK", [order, length], ascending, types=two)  # the sorted position of each row
    numbers = body.op("Unsqueeze", [constant(list(range(count))), rest])
    chosen = body.op("Cast", [body.op("Equal", [expert, numbers])], {"to": INT64.value})
    sizes = body.op("ReduceSum", [chosen, rest], {"keepdims": 0})  # rows of each expert
    inputs = [body.op("Gather", [rows, order], {"axis": 0}), sizes]
    parts = body.ops("Split", inputs, {"axis": 0}, types=[(None, None)] * count)
    products = [product(body, part, index) for index, part in enumerate(parts)]
    joined = body.op("Concat", products, {"axis": 0})
    restored = body.op("Gather", [joined, inverse], {"axis": 0})
    return body.op("Reshape", [restored, body.op("Concat", [choices, rest], {"axis": 0})])


def _quantized_product(node: ir.Node) -> Product:
    (name,), width = node.attributes["weights"].as_strings(), node.attributes["width"].as_int()

    def product(body: GraphBuilder, rows: ir.Value, expert: int) -> ir.Value:
        attributes = {"weights": [f"{name}.{expert}"]}
        return body.op(OP_QUANTIZED_MATMUL, [rows], attributes, domain=DOMAIN, dtype=FLOAT, shape=[None, width])

    return product


def _float_product(graph: ir.Graph, node: ir.Node, weights: ir.Value) -> Product:
    transposed = bool(node.attributes["transposed"].as_int())
    tensor = required(weights.const_value)
    first, second = static_dim(weights, 1), static_dim(weights, 2)
    shape = (first, second) if transposed else (second, first)

    def product(body: GraphBuilder, rows: ir.Value, expert: int) -> ir.Value:
        def matrix() -> np.ndarray:
            return np.ascontiguousarray(tensor.numpy()[expert] if transposed else tensor.numpy()[expert].T)

        weight = derived_weight(graph, f"{weights.name}.{expert}", shape, tensor.dtype, matrix)
        return body.op("MatMul", [rows, weight], dtype=FLOAT, shape=[None, shape[1]])

    return product
