"""`tide::TideQuantizedMatMul` becomes `com.microsoft.MatMulNBits`, `tide::TideQuantizedGather` GatherBlockQuantized.

The integers are those that were made of the model's weights before it was calibrated and traced. A matrix that is both
multiplied by and looked up in (a head tied to the embedding) is one array under two shapes, which `package.save_graph`
writes once. Every node says in its metadata which parameters its rows are of, so that `verify.quantized` can read the
model back out of a bundle.

Postcondition: none of the symbolic operators is left. Raises GraphError for a matrix that was not quantized.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from tide_export.bundle.manifest import Quantization
from tide_export.errors import GraphError
from tide_export.lower.rewriting import add_before, constant, drop_unused, nodes_of
from tide_export.model.quantized_weights import Blocks, concatenate
from tide_export.names import DOMAIN, OP_QUANTIZED_GATHER, OP_QUANTIZED_MATMUL, WEIGHTS_METADATA


class QuantizedProductsPass(ir.passes.InPlacePass):
    def __init__(self, blocks: Mapping[str, Blocks], settings: Quantization | None):
        super().__init__()
        self.blocks = blocks
        self.settings = settings

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        products, gathers = nodes_of(model, OP_QUANTIZED_MATMUL, DOMAIN), nodes_of(model, OP_QUANTIZED_GATHER, DOMAIN)
        for node in products:
            self._product(model, node)
        for node in gathers:
            self._gather(model, node)
        return ir.passes.PassResult(model, modified=bool(products or gathers))

    def _product(self, model: ir.Model, node: ir.Node) -> None:
        assert self.settings is not None
        names = node.attributes["weights"].as_strings()
        whole = concatenate(self._of(names))
        attributes = {
            "K": whole.columns,
            "N": whole.rows,
            "bits": whole.bits,
            "block_size": whole.block_size,
            "accuracy_level": self.settings.accuracy_level,
        }
        x, *bias = node.inputs
        inputs = [x, *_stored(model, names, whole)]
        if bias:
            inputs += [*[None] * (5 - len(inputs)), bias[0]]  # between them: zero points, an order of the columns
        self._replace(node, names, "MatMulNBits", inputs, attributes)

    def _gather(self, model: ir.Model, node: ir.Node) -> None:
        names = node.attributes["weights"].as_strings()
        (whole,) = self._of(names)
        _, *rest = _stored(model, names, whole)
        rows = constant(model, f"{names[0]}.rows", whole.packed.reshape(whole.rows, -1))
        attributes = {"bits": whole.bits, "block_size": whole.block_size, "gather_axis": 0, "quantize_axis": 1}
        gather = self._replace(node, names, "GatherBlockQuantized", [rows, node.inputs[0], *rest], attributes)
        if whole.columns % whole.block_size:
            _cut(model, gather, whole.columns)

    def _of(self, names: Sequence[str]) -> list[Blocks]:
        for name in names:
            if name not in self.blocks:
                raise GraphError(f"the graph multiplies by {name}, which was not quantized")
        return [self.blocks[name] for name in names]

    def _replace(
        self, node: ir.Node, names: Sequence[str], op_type: str, inputs: Sequence[ir.Value | None], attributes: Mapping
    ) -> ir.Node:
        output = node.outputs[0]
        new = add_before(
            node, op_type, inputs, attributes, domain="com.microsoft", outputs=[(output.dtype, output.shape)]
        )
        new.metadata_props[WEIGHTS_METADATA] = "\n".join(names)
        name = output.name
        output.replace_all_uses_with(new.outputs[0], replace_graph_outputs=True)
        drop_unused([node])
        new.outputs[0].name = name
        return new


def quantized_names(node: ir.Node) -> list[str]:
    """The parameters whose quantized rows a node multiplies by or looks up in; none of any other node."""
    names = node.metadata_props.get(WEIGHTS_METADATA)
    return names.split("\n") if names else []


def _stored(model: ir.Model, names: Sequence[str], whole: Blocks) -> list[ir.Value]:
    """The initializers of a matrix: blocks, scales and, where it has some, zero points."""
    name = "+".join(names)
    found = [constant(model, f"{name}.blocks", whole.packed), constant(model, f"{name}.scales", whole.scales)]
    return found if whole.zeros is None else [*found, constant(model, f"{name}.zeros", whole.zeros)]


def _cut(model: ir.Model, gather: ir.Node, columns: int) -> None:
    """Takes the columns that only fill the last block off what `gather` gives [..., K']."""
    output = gather.outputs[0]
    ends = [constant(model, f"slice_{n}", np.array([n], dtype=np.int64)) for n in (0, columns, -1)]
    node = ir.node("Slice", [output, *ends], num_outputs=1, name=f"{gather.name}/Slice")
    cut = node.outputs[0]
    cut.name, cut.type, cut.shape = f"{node.name}.0", output.type, output.shape
    output.shape = None
    assert gather.graph is not None
    gather.graph.insert_after(gather, node)
    output.replace_all_uses_with(cut, replace_graph_outputs=True)
    node.replace_input_with(0, output)
