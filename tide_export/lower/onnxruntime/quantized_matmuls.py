"""Replaces symbolic quantized products and look-ups by ONNX Runtime's.

`tide::TideQuantizedMatMul` becomes `com.microsoft.MatMulNBits`, `tide::TideQuantizedGather` `GatherBlockQuantized`.

A matmul without zero points, whose inputs are rounded to 8 bits too, is `tide::TideInt4MatMul` or `TideInt8MatMul`,
operators of the library in `cpp/ops`. They are also model-local functions, MatMulNBits, which ONNX Runtime inlines
where the library is not registered or the CPU lacks the instructions. One with outlier columns (`quantize.outliers`) is
`tide::TideInt4OutlierMatMul`, in whose function the inputs of these columns follow all inputs.

The integers are those that the weights were rounded to before the model was calibrated and traced. A matrix that is
both multiplied by and looked up in (a head tied to the embedding) is one array under two shapes, which
`pipeline.contents.save_graph` writes once. Every node names in its metadata the parameters that its rows belong to, so
that `verify.quantized` can read the model back out of a bundle.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx.parser
import onnx_ir as ir

from tide_export.bundle.manifest import INT8_MATMULS, Quantization
from tide_export.graph.builder import OPSET
from tide_export.graph.rewriting import (
    FLOAT,
    constant,
    derived_weight,
    dims,
    ensure_none_left,
    integers,
    nodes_of,
    op_before,
    replace_value,
    required,
)
from tide_export.lower.onnxruntime.half_weights import half_matmul_function
from tide_export.model.quantized_weights import Blocks, Fp8Matrix, IntegerMatrix
from tide_export.names.operators import (
    DOMAIN,
    INTEGER_MATMULS,
    OP_HALF_MATMUL,
    OP_INTEGER_MATMUL,
    OP_OUTLIER_MATMUL,
    OP_QUANTIZED_GATHER,
    OP_QUANTIZED_MATMUL,
    WEIGHTS_METADATA,
)


class QuantizedMatMulsPass(ir.passes.InPlacePass):
    def __init__(
        self, blocks: Mapping[str, IntegerMatrix | Fp8Matrix], settings: Quantization | None, own: bool = True
    ):
        """Takes the matrices and how they were quantized.

        `blocks`: by the names the nodes use; `settings`: None for matrices in FP8, or if none is; `own`: whether the
        operators of the library may be used, which are for the CPU.
        """
        super().__init__()
        self.blocks = blocks
        self.settings = settings
        self.own = own

    def requires(self, model: ir.Model) -> None:
        for node in _symbolic(model):
            for name in node.attributes["weights"].as_strings():
                if name not in self.blocks:
                    raise ir.passes.PreconditionError(f"the graph multiplies by {name}, which was not quantized")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = _symbolic(model)
        for node in nodes:
            (self._matmul if node.op_type == OP_QUANTIZED_MATMUL else self._gather)(model.graph, node)
        add_matmul_functions(model, [op for op in INTEGER_MATMULS if nodes_of(model.graph, op, DOMAIN)])
        return ir.passes.PassResult(model, modified=bool(nodes))

    def ensures(self, model: ir.Model) -> None:
        ensure_none_left(_symbolic(model))

    def _matmul(self, graph: ir.Graph, node: ir.Node) -> None:
        names = node.attributes["weights"].as_strings()
        parts = [self.blocks[name] for name in names]
        blocks = [part for part in parts if not isinstance(part, Fp8Matrix)]
        if not blocks:
            _float_matmul(graph, node, names, parts)
            return
        first = blocks[0]
        attributes = {
            "K": first.columns,
            "N": sum(matrix.rows for matrix in blocks),
            "bits": first.bits,
            "block_size": first.block_size,
            "accuracy_level": required(self.settings).accuracy_level if self.own else 0,
        }
        x, *bias = node.inputs
        inputs, output = [x, *_stored(graph, names, blocks)], node.outputs[0]
        outliers = _outliers(blocks)
        if self.own and first.symmetric and attributes["accuracy_level"] == INT8_MATMULS:
            op = OP_INTEGER_MATMUL[first.bits]
            if outliers is not None:
                op = OP_OUTLIER_MATMUL
                inputs.append(constant(graph, f"{'+'.join(names)}.outliers", outliers))
            result = _quantized_op(node, op, inputs, attributes, DOMAIN)
            if bias:
                result = op_before(node, "Add", [result, bias[0]], dtype=output.dtype, shape=output.shape)
        else:
            if outliers is not None:
                inputs[0] = _with_again(node, required(x), constant(graph, f"{'+'.join(names)}.outliers", outliers))
            if bias:
                inputs += [*[None] * (5 - len(inputs)), bias[0]]  # between them: zero points, an order of the columns
            result = _quantized_op(node, "MatMulNBits", inputs, attributes)
        replace_value(output, result)

    def _gather(self, graph: ir.Graph, node: ir.Node) -> None:
        (name,) = names = node.attributes["weights"].as_strings()
        matrix, output = self.blocks[name], node.outputs[0]
        assert not isinstance(matrix, Fp8Matrix)
        _, *rest = _stored(graph, names, [matrix])
        rows = constant(graph, f"{name}.rows", matrix.packed.reshape(matrix.rows, -1))
        attributes = {"bits": matrix.bits, "block_size": matrix.block_size, "gather_axis": 0, "quantize_axis": 1}
        gathered = _quantized_op(node, "GatherBlockQuantized", [rows, node.inputs[0], *rest], attributes)
        if matrix.columns % matrix.block_size:  # the last block of a row is padded
            gathered.shape = None
            ends = [integers(graph, f"slice_{n}", [n]) for n in (0, matrix.columns, -1)]
            gathered = op_before(node, "Slice", [gathered, *ends], dtype=output.dtype, shape=output.shape)
        replace_value(output, gathered)


def add_matmul_functions(model: ir.Model, operators: Iterable[str], opset: int = OPSET) -> None:
    """Adds the functions of these matmuls in 16, 8 or 4 bits to `model`."""
    for op in operators:
        weights_type = next((weights for weights, half in OP_HALF_MATMUL.items() if half == op), None)
        function = integer_matmul_function(op) if weights_type is None else half_matmul_function(weights_type, opset)
        model.functions.setdefault(function.identifier(), function)


def integer_matmul_function(name: str) -> ir.Function:
    """Defines `name`(x [.., K], integers, scales[, outliers]) -> y [.., N] by MatMulNBits.

    The attributes are the same.
    """
    settings = ("K", "N", "bits", "block_size", "accuracy_level")
    references = ", ".join(f"{setting}: int = @{setting}" for setting in settings)
    outliers = name == OP_OUTLIER_MATMUL
    taken = "x, integers, scales, outliers" if outliers else "x, integers, scales"
    again = "again = Gather <axis = -1> (x, outliers)  all = Concat <axis = -1> (x, again)" if outliers else ""
    text = f"""<opset_import: ["" : {OPSET}, "com.microsoft" : 1], domain: "{DOMAIN}">
        {name} <{", ".join(settings)}> ({taken}) => (y) {{
            {again}
            y = com.microsoft.MatMulNBits <{references}> ({"all" if outliers else "x"}, integers, scales)
        }}"""
    return ir.serde.deserialize_function(onnx.parser.parse_function(text))


def _with_again(node: ir.Node, x: ir.Value, outliers: ir.Value) -> ir.Value:
    """Adds what `integer_matmul_function` has for outliers: `x` and, again, those of its inputs."""
    again = op_before(node, "Gather", [x, outliers], {"axis": -1}, dtype=x.dtype, shape=[*dims(x)[:-1], None])
    return op_before(node, "Concat", [x, again], {"axis": -1}, dtype=x.dtype, shape=[*dims(x)[:-1], None])


def _outliers(matrices: Sequence[IntegerMatrix]) -> np.ndarray | None:
    """Returns the outliers of `matrices`, which are multiplied by the same inputs; None: they have none."""
    found = [matrix.outliers for matrix in matrices]
    if len({None if outliers is None else outliers.tobytes() for outliers in found}) > 1:
        raise ValueError("matrices of the same inputs have other outliers")
    return found[0]


def _float_matmul(
    graph: ir.Graph, node: ir.Node, names: Sequence[str], matrices: Sequence[IntegerMatrix | Fp8Matrix]
) -> None:
    """Replaces `node` by a MatMul in float32 with the numbers that its matrices represent."""
    x, *bias = node.inputs
    rows, columns, output = sum(matrix.rows for matrix in matrices), matrices[0].columns, node.outputs[0]

    def values() -> np.ndarray:
        return np.ascontiguousarray(np.concatenate([matrix.values() for matrix in matrices]).T)

    weight = derived_weight(graph, f"{'+'.join(names)}.values", [columns, rows], FLOAT, values)
    product = op_before(node, "MatMul", [x, weight], dtype=FLOAT, shape=output.shape)
    required(product.producer()).metadata_props[WEIGHTS_METADATA] = "\n".join(names)
    if bias:
        product = op_before(node, "Add", [product, *bias], dtype=FLOAT, shape=output.shape)
    replace_value(output, product)


def quantized_names(node: ir.Node) -> list[str]:
    """The parameters whose quantized rows `node` multiplies by or looks up in; empty for any other node."""
    names = node.metadata_props.get(WEIGHTS_METADATA)
    return names.split("\n") if names else []


def _symbolic(model: ir.Model) -> list[ir.Node]:
    return [node for op in (OP_QUANTIZED_MATMUL, OP_QUANTIZED_GATHER) for node in nodes_of(model.graph, op, DOMAIN)]


def _quantized_op(
    node: ir.Node,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, int],
    domain: str = "com.microsoft",
) -> ir.Value:
    """The operator that replaces `node`, before it."""
    old = node.outputs[0]
    value = op_before(node, op_type, inputs, attributes, domain=domain, dtype=old.dtype, shape=old.shape)
    required(value.producer()).metadata_props[WEIGHTS_METADATA] = "\n".join(node.attributes["weights"].as_strings())
    return value


def _stored(graph: ir.Graph, names: Sequence[str], matrices: Sequence[IntegerMatrix]) -> list[ir.Value]:
    """The initializers of the rows of `matrices`: blocks, scales and, if they have some, zero points.

    They are made when the model is written, but for a matrix that is held as it is written.
    """
    first, rows = matrices[0], sum(matrix.rows for matrix in matrices)
    count, prefix = -(-first.columns // first.block_size), "+".join(names)
    zeros: list[int] = [] if first.symmetric else [rows, -(-count * first.bits // 8)]
    tensors = {
        "blocks": ("packed", ir.DataType.UINT8, [rows, count, first.block_size * first.bits // 8]),
        "scales": ("scales", FLOAT, [rows, count]),
        "zeros": ("zeros", ir.DataType.UINT8, zeros),
    }
    values = []
    for kind, (attribute, dtype, shape) in tensors.items():
        if not shape:
            continue
        if isinstance(first, Blocks) and len(matrices) == 1:
            values.append(constant(graph, f"{prefix}.{kind}", getattr(first, attribute)))
            continue

        def joined(attribute: str = attribute) -> np.ndarray:
            return np.concatenate([getattr(matrix, attribute) for matrix in matrices])

        values.append(derived_weight(graph, f"{prefix}.{kind}", shape, dtype, joined))
    return values
