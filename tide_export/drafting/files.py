"""Writes the networks of a drafter, which share the embedding of the bundle's graphs.

The nodes that look up the embedding are copied from the bundle's graph.
"""

import math
from pathlib import Path

import onnx_ir as ir

from tide_export.bundle.drafter_field import DrafterInfo, token_ranges
from tide_export.bundle.file_names import GRAPH_FILE, network_file
from tide_export.bundle.manifest import FLOAT32_KV, INT8_MATMULS, Manifest, Quantization
from tide_export.compose.drafter_networks import EMBEDDINGS, DrafterPieces, compose_drafter
from tide_export.errors import DraftError
from tide_export.graph.rewriting import FLOAT, HALF, replace_value, required
from tide_export.lower.cuda.lower import drafter_for_cuda
from tide_export.lower.onnxruntime.lower import lower_for_onnxruntime
from tide_export.lower.tensorrt.drafter_for_tensorrt import drafter_for_tensorrt
from tide_export.model.quantized_weights import QuantizedWeights
from tide_export.names import segment_networks as names
from tide_export.names.networks import DRAFTER, segment_name
from tide_export.quantize.rounding import round_to_nearest
from tide_export.runtime.tensorrt.flavours import FLAVOURS

MAX_TOKENS = 2048  # maximum rows of a sequence, after which a drafter starts anew
ROW_MULTIPLE = 16  # rows are a multiple of it, so that the K/V of each slot start at an aligned address
QUANTIZATION = Quantization("rtn", bits=4, block_size=16, symmetric=True, accuracy_level=INT8_MATMULS)


def rows_for(context: int | None) -> int:
    """Returns the maximum number of rows of a drafter for a model with `context` tokens."""
    return math.ceil(min(context or MAX_TOKENS, MAX_TOKENS) / ROW_MULTIPLE) * ROW_MULTIPLE


def drafter_info(pieces: DrafterPieces, weights_sha256: str, record: dict | None) -> DrafterInfo:
    """Returns the manifest's entry for a drafter; `record` is the training's provenance."""
    return DrafterInfo(
        weights_sha256,
        token_ranges(pieces.tokens.tolist()),
        pieces.acceptance,
        pieces.max_tokens,
        pieces.hidden_size,
        pieces.layers,
        None if pieces.shared_kv else pieces.kv_shape,
        record,
        tuple(pieces.shared_kv) or None,
        pieces.num_layers if pieces.block_size else None,
        pieces.block_size or None,
    )


def save_drafter(folder: Path, pieces: DrafterPieces, file: Path, kv_cache: str = FLOAT32_KV) -> None:
    """Writes the network for ONNX Runtime to `file`, for the bundle in `folder` with pages of `kv_cache`."""
    model = compose_drafter(pieces)
    lower_for_onnxruntime(model, quantized(pieces), kv_cache=kv_cache if pieces.shared_kv else FLOAT32_KV)
    put_before(model, embedding_of(folder / GRAPH_FILE, FLOAT))
    ir.save(model, file)


def save_drafter_segment(folder: Path, pieces: DrafterPieces, manifest: Manifest, file: Path) -> None:
    """Writes the network that runs with segment networks to `file`, for the bundle in `folder`."""
    weights = required(manifest.networks).weights
    if manifest.has_cuda_networks:
        model = drafter_for_cuda(pieces, weights)
    else:
        folds = any(flavour.folds_queries for name, flavour in FLAVOURS.items() if name in manifest.targets)
        model = drafter_for_tensorrt(pieces, weights, folds)
    put_before(model, embedding_of(folder / network_file(segment_name(0)), HALF.get(weights, FLOAT)))
    ir.save(model, file)


def quantized(pieces: DrafterPieces, settings: Quantization = QUANTIZATION) -> QuantizedWeights:
    """Rounds the matrices of a drafter to integers."""
    matrices = pieces.matrices.items()
    return QuantizedWeights(settings, {name: round_to_nearest(matrix, settings) for name, matrix in matrices})


def embedding_of(graph: Path, dtype: ir.DataType) -> ir.Model:
    """Returns the first nodes of a graph, which turn token ids into embeddings of type `dtype`.

    Raises:
        DraftError: the graph has no such nodes that read the ids alone.
    """
    model = ir.load(graph)
    shared = {value for value in model.graph.inputs if value.name == names.EMBEDDING}
    values, nodes = {value for value in model.graph.inputs if value.name == names.INPUT_IDS}, list[ir.Node]()
    for node in model.graph:
        read = {value for value in node.inputs if value is not None and value.const_value is None} - shared
        if not read or not read <= values:
            continue
        nodes.append(node)
        values |= set(node.outputs)
        if node.outputs[0].dtype == dtype:
            break
    if not nodes or nodes[-1].outputs[0].dtype != dtype:
        raise DraftError(f"bundle {graph.parent} has no single lookup of its embedding: a drafter cannot read it")
    for node in list(model.graph):
        if node not in nodes:
            for index in range(len(node.inputs)):
                node.replace_input_with(index, None)
    output = nodes[-1].outputs[0]
    model.graph.outputs.clear()
    model.graph.outputs.append(output)
    model.graph.remove([node for node in model.graph if node not in nodes])
    return model


def put_before(model: ir.Model, embedding: ir.Model) -> None:
    """Moves the nodes of `embedding` into `model`, which then reads token ids instead of embeddings."""
    output = embedding.graph.outputs[0]
    graph = model.graph
    (placeholder,) = (value for value in graph.inputs if value.name == EMBEDDINGS)
    (ids,) = (value for value in embedding.graph.inputs if value.name == names.INPUT_IDS)
    nodes = list(embedding.graph)
    weights = [
        value for value in embedding.graph.initializers.values() if any(node in nodes for node, _ in value.uses())
    ]
    embedding.graph.outputs.clear()
    embedding.graph.remove(nodes)
    for weight in weights:
        embedding.graph.initializers.pop(str(weight.name))
        if (other := graph.initializers.pop(str(weight.name), None)) is not None:  # a constant that a trace named
            other.name = f"{DRAFTER}.{other.name}"
            graph.initializers.add(other)
        graph.initializers.add(weight)
    for value in (made for node in nodes for made in node.outputs):
        value.name = f"{names.EMBEDDING}.{value.name}"
    replace_value(placeholder, output)
    graph.insert_before(required(next(iter(graph))), nodes)
    shared = [value for value in embedding.graph.inputs if value.name == names.EMBEDDING]
    for value in (ids, *shared):
        embedding.graph.inputs.remove(value)
    graph.inputs.extend(shared)
    ids.shape = ir.Shape(required(placeholder.shape)[:2])
    graph.inputs[list(graph.inputs).index(placeholder)] = ids
