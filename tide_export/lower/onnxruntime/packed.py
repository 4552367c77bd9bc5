"""Writes the batch networks: one per segment, and the head, on the weights of `model.onnx`.

The model of `compose.packed_segments` goes through the passes of the step graph, so every weight is stored in the same
form under the same name. Each part then becomes a file that refers to `model.onnx.data` by its path in the bundle: to
load one, set the bundle as ONNX Runtime's folder of external weights
(`session.model_external_initializers_file_folder_path`).
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import onnx_ir as ir
import onnx_ir.convenience as irc

from tide_export.bundle.file_names import BATCH_FOLDER, GRAPH_FILE, batch_file
from tide_export.compose.cut import Pieces
from tide_export.compose.packed_segments import Part, compose_packed
from tide_export.compose.step_graph import LensWeights, RouterWeights
from tide_export.errors import GraphError
from tide_export.graph.rewriting import remove_unused, required
from tide_export.lower.onnxruntime.lower import lower_for_onnxruntime

INLINE_BYTES = 64 * 1024  # a larger weight that model.onnx does not hold is an error: each network would store it


def save_batch_networks(
    folder: Path,
    pieces: Pieces,
    routers: RouterWeights,
    lenses: LensWeights | None,
    fuse: ir.Graph | None = None,
    lower: Callable[[ir.Model], ir.Model] = lower_for_onnxruntime,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes the networks into `folder`.

    `pipeline.contents.save_graph` wrote the step graph of the same pieces there.

    Args:
        fuse: as in `compose.step_graph.compose`.
        lower: the function that lowered the step graph, so that the weights are equal.
        metadata: what the segments record for a runtime to compare (see `Manifest.graph_metadata`).

    Raises:
        GraphError: the graph in `folder` does not hold a weight that the networks read.
    """
    model, parts = compose_packed(pieces, routers, lenses, fuse)
    lower(model)
    stored = ir.load(folder / GRAPH_FILE).graph.initializers
    for value in model.graph.initializers.values():
        _point_to(value, stored.get(str(value.name)))
    (folder / BATCH_FOLDER).mkdir()
    for part in parts:
        network = _network(model, part)
        remove_unused(network)
        network.metadata_props.update(metadata or {})
        ir.save(network, folder / batch_file(part.name))


def _point_to(value: ir.Value, stored: ir.Value | None) -> None:
    """Makes `value` refer to the stored weight of the same name."""
    external, tensor = stored.const_value if stored is not None else None, required(value.const_value)
    if isinstance(external, ir.ExternalTensor) and (external.dtype, external.shape) == (tensor.dtype, tensor.shape):
        value.const_value = external
    elif tensor.nbytes > INLINE_BYTES:
        raise GraphError(f"the networks of a batch read {value.name}, which the graph does not hold in that form")


def _network(model: ir.Model, part: Part) -> ir.Model:
    """A copy of one part, whose inputs and outputs get the part's names."""
    graph = irc.extract(model.graph, list(part.inputs.values()), list(part.outputs.values()))
    for values, part_names in ((graph.inputs, part.inputs), (graph.outputs, part.outputs)):
        for value, name in zip(values, part_names, strict=True):
            value.name = name
    functions = [function.clone() for function in model.functions.values()]
    return ir.Model(graph, ir_version=model.ir_version, producer_name=model.producer_name, functions=functions)
