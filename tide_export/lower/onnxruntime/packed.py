"""The networks of a batch: one per segment and size of batch, and one for the head, on the weights of `model.onnx`.
Where K/V are propagated, one more per segment behind the first, for the sequences that skip it.

What `compose.packed_segments` puts side by side goes through the very passes of the one-sequence graph, so every weight
is stored in the same form under the same name; then each part becomes a file of its own that points into
`model.onnx.data`, by its path in the bundle: whoever loads one gives ONNX Runtime the bundle as the folder of external
weights (`session.model_external_initializers_file_folder_path`).

A size of batch has its own networks because idle rows are not quite free; a batch takes the smallest that holds it.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import onnx_ir as ir
import onnx_ir.convenience as irc
from onnx_ir.passes import common as common_passes

from tide_export import names
from tide_export.compose.cut import Pieces
from tide_export.compose.packed_segments import Part, compose_batch
from tide_export.compose.step_graph import LensWeights, RouterWeights
from tide_export.errors import GraphError, UnsupportedModelError
from tide_export.lower.onnxruntime.lower import lower_for_onnxruntime
from tide_export.lower.onnxruntime.packed_sequences import PackedRowsPass

INLINE_BYTES = 64 * 1024  # a larger weight that model.onnx does not hold would be stored once per network


def save_batch_networks(
    folder: Path,
    pieces: Pieces,
    routers: RouterWeights,
    lenses: LensWeights | None,
    sizes: Sequence[int] = names.BATCH_SIZES,
    lower: Callable[[ir.Model], ir.Model] = lower_for_onnxruntime,
) -> None:
    """Writes the networks into `folder`, in which `package.save_graph` wrote the graph of the same pieces.

    Args:
        sizes: of batch; all that the runtime may ask for.
        lower: what the graph was lowered with; otherwise the weights are others.

    Raises:
        UnsupportedModelError: the model counts positions on from the first token's; nothing is written then.
        GraphError: the graph in `folder` does not hold a weight that the networks read.
    """
    for piece in (pieces.embed, *pieces.segments):
        check_positions(piece)
    model, parts = compose_batch(pieces, routers, lenses)
    lower(model)
    stored = ir.load(folder / names.GRAPH_FILE).graph.initializers
    for value in model.graph.initializers.values():
        _point_to(value, stored.get(str(value.name)))
    (folder / names.BATCH_FOLDER).mkdir()
    for part in parts:
        for rows in sizes if part.has_rows else (None,):
            network = _network(model, part)
            if rows is not None:
                PackedRowsPass(rows)(network)
            _tidy(network)
            ir.save(network, folder / names.batch_file(part.name, rows))


def check_positions(piece: ir.Graph) -> None:
    """Every token's position must be read, not one token's: behind the last of a sequence comes the first of another.

    Raises:
        UnsupportedModelError: positions are picked out (Llama 4's query scaling takes the first and counts on).
    """
    positions = piece.inputs[1]
    for node, index in positions.uses():
        if index == 0 and node.op_type in ("Gather", "Slice", "Split", "GatherElements", "GatherND"):
            raise UnsupportedModelError(
                "it takes one token's position and counts on from there, so the tokens of several sequences cannot lie "
                "behind one another"
            )


def _point_to(value: ir.Value, stored: ir.Value | None) -> None:
    tensor, own = stored.const_value if stored is not None else None, value.const_value
    assert own is not None
    if isinstance(tensor, ir.ExternalTensor) and (tensor.dtype, tensor.shape) == (own.dtype, own.shape):
        value.const_value = tensor
    elif own.nbytes > INLINE_BYTES:
        raise GraphError(f"the networks of a batch read {value.name}, which the graph does not hold in that form")


def _network(model: ir.Model, part: Part) -> ir.Model:
    """A copy of one part, under the names of its own."""
    graph = irc.extract(model.graph, list(part.inputs.values()), list(part.outputs.values()))
    for values, given in ((graph.inputs, part.inputs), (graph.outputs, part.outputs)):
        for value, name in zip(values, given, strict=True):
            value.name = name
    functions = [function.clone() for function in model.functions.values()]
    return ir.Model(graph, ir_version=model.ir_version, producer_name=model.producer_name, functions=functions)


def _tidy(network: ir.Model) -> None:
    ir.passes.Sequential(
        common_passes.RemoveUnusedNodesPass(),
        common_passes.RemoveUnusedFunctionsPass(),
        common_passes.RemoveUnusedOpsetsPass(),
    )(network)
