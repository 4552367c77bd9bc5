"""Reads the quantized weights of a bundle back, so that the reference computes with the same values.

`validate` writes them into the model the bundle was made from; `float32_engine` runs the bundle's graph with matmuls
in float32, where it must equal that reference token for token whatever its accuracy level.
"""

import tempfile
from collections.abc import Iterable, Iterator
from mmap import mmap

import numpy as np
import onnx
import onnx_ir as ir

from tide_export.bundle.engine_fields import FP8
from tide_export.bundle.manifest import CHECKPOINT, INT8_KV, INT8_MATMULS
from tide_export.bundle.opened import Bundle
from tide_export.errors import BundleError
from tide_export.heads.pieces import FC
from tide_export.lower.onnxruntime.layers import inline_layers
from tide_export.model.quantized_weights import Blocks
from tide_export.model.source import SourceModel
from tide_export.names import GRAPH_FILE, OP_GATED_MATMUL, OP_INTEGER_MATMUL, WEIGHTS_FILE, WEIGHTS_METADATA
from tide_export.quantize.fp8 import round_to_fp8
from tide_export.quantize.half import round_to_half
from tide_export.quantize.matrices import find_matrices
from tide_export.runtime.engine import Engine, open_engine
from tide_export.trace.rewriting import HALF
from tide_export.verify.parity import TOLERANCES, EngineUnderTest

FLOAT32_MATMULS = 1  # an accuracy level
INTEGER_MATMULS = [name for plain in OP_INTEGER_MATMUL.values() for name in (plain, OP_GATED_MATMUL[plain])]


def restore(source: SourceModel, bundle: Bundle) -> float | None:
    """Overwrites the weights of `source` with those of the bundle, where these are not the same.

    Returns:
        The relative error: the root of the squared differences over the squared weights; None: they are the same.

    Raises:
        BundleError: the graph's quantized matrices are not those of this model.
    """
    if (weights := bundle.manifest.weights) in HALF:
        return None if weights in source.exact_in else round_to_half(source, weights)
    networks = bundle.manifest.networks
    if networks is not None and networks.matrices == FP8:
        return round_to_fp8(source, HALF[networks.weights].numpy())
    settings = bundle.manifest.quantization
    if settings is None or settings.method == CHECKPOINT:
        return None
    rows = {matrix.name: matrix for matrix in find_matrices(source).all()}
    squared_error = squared = 0.0
    done: set[str] = set()
    for names, whole in stored_matrices(bundle):
        if names == [FC]:  # of a draft head, not of the model
            continue
        if any(name not in rows for name in names):
            unknown = next(name for name in names if name not in rows)
            raise BundleError(f"bundle '{bundle.path}' has a quantized matrix {unknown} that {source.name} has not")
        if done.issuperset(names):
            continue  # a shared embedding and head
        before = [rows[name].read() for name in names]
        if sum(map(len, before)) != whole.rows or {old.shape[1] for old in before} != {whole.columns}:
            raise BundleError(
                f"bundle '{bundle.path}': the quantized matrix {names[0]} is of another size than its model's"
            )
        for name, old, part in zip(names, before, whole.split([len(old) for old in before]), strict=True):
            new = part.values()
            squared_error += float(np.square(new - old, dtype=np.float64).sum())
            squared += float(np.square(old, dtype=np.float64).sum())
            rows[name].write(new)
        done.update(names)
    if not done:
        raise BundleError(f"bundle '{bundle.path}' has no quantized matrix, though its manifest says so")
    return (squared_error / squared) ** 0.5 if squared else 0.0


def computes_in_float32(bundle: Bundle) -> bool:
    """Whether the graph multiplies without rounding the inputs to 8 bits first."""
    settings = bundle.manifest.quantization
    return settings is None or settings.accuracy_level != INT8_MATMULS


def float32_engine(bundle: Bundle, threads: int | None = None) -> Engine:
    """Opens the bundle's graph with quantized matmuls computed in float32. Raises as `runtime.engine.load`."""
    proto = ir.to_proto(_graph(bundle))
    for function in proto.functions:
        if function.name in INTEGER_MATMULS:
            function.name += "Function"
            _as_functions(function.node)
    _set_level(proto.graph)
    with tempfile.NamedTemporaryFile(suffix=".onnx") as graph:
        graph.write(proto.SerializeToString())
        graph.flush()
        return open_engine(bundle, "cpu", threads, graph=graph.name)


def graph_engines(bundle: Bundle, threads: int | None) -> list[EngineUnderTest]:
    """Opens the engines to compare for a bundle's graph.

    A graph that rounds the inputs of its matmuls to 8 bits is compared with matmuls in float32 first, which shows that
    integers, scales and everything around them are right, and then as it is, within that rounding.
    """
    deployed = open_engine(bundle, "cpu", threads)
    float32 = TOLERANCES["fp32" if bundle.manifest.kv_dtype != INT8_KV else "int8 K/V"]
    if computes_in_float32(bundle):
        return [EngineUnderTest("", deployed, float32)]
    return [
        EngineUnderTest("float32 matmuls", float32_engine(bundle, threads), float32, as_deployed=False),
        EngineUnderTest("", deployed, TOLERANCES["int8 matmuls"]),
    ]


def _set_level(graph: onnx.GraphProto) -> None:
    _as_functions(graph.node)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _set_level(attribute.g)
            elif attribute.name == "accuracy_level":
                attribute.i = FLOAT32_MATMULS


def _as_functions(nodes: Iterable[onnx.NodeProto]) -> None:
    """Names the functions of integer matmuls, MatMulNBits, as no operator is called."""
    for node in nodes:
        if node.op_type in INTEGER_MATMULS:
            node.op_type += "Function"


def _graph(bundle: Bundle) -> ir.Model:
    """The bundle's graph, every matmul a node of it."""
    model = ir.from_proto(onnx.load_model_from_string(bundle.file(GRAPH_FILE).read_bytes()))
    inline_layers(model)
    return model


def stored_matrices(bundle: Bundle) -> Iterator[tuple[list[str], Blocks]]:
    """The quantized matrices of the graph, each with the names of the parameters its rows come from."""
    with bundle.file(WEIGHTS_FILE).mapped() as weights:
        for node in _graph(bundle).graph.all_nodes():
            if node.op_type not in ("MatMulNBits", *INTEGER_MATMULS, "GatherBlockQuantized"):
                continue
            indices = (0, 2, 3) if node.op_type == "GatherBlockQuantized" else (1, 2, 3)
            arrays = [_array(node.inputs[i], weights) if i < len(node.inputs) else None for i in indices]
            packed, scales, zeros = arrays
            if packed is None or scales is None or WEIGHTS_METADATA not in node.metadata_props:
                raise BundleError(f"bundle '{bundle.path}': node {node.name} does not name its weights")
            bits = node.attributes["bits"].as_int()
            columns = node.attributes.get_int("K", 0)
            names = node.metadata_props[WEIGHTS_METADATA].split("\n")
            if node.op_type == "GatherBlockQuantized":
                packed = packed.reshape(len(packed), scales.shape[1], -1)
                columns = _columns(node, weights) or scales.shape[1] * node.attributes["block_size"].as_int()
            yield names, Blocks(packed, scales, zeros, columns, bits)


def _columns(gather: ir.Node, weights: mmap | bytes) -> int | None:
    """The columns that the graph keeps of a gather, where it cuts the last block."""
    users = [use.node for use in gather.outputs[0].uses()]
    if len(users) != 1 or users[0].op_type != "Slice":
        return None
    end = _array(users[0].inputs[2], weights)
    return None if end is None else int(end[0])


def _array(value: ir.Value | None, weights: mmap | bytes) -> np.ndarray | None:
    """The constant `value`; `weights`: what the file of the external weights holds."""
    tensor = None if value is None else value.const_value
    if isinstance(tensor, ir.ExternalTensor):
        return np.ndarray(tensor.shape.numpy(), tensor.dtype.numpy(), weights, tensor.offset or 0)
    return None if tensor is None else tensor.numpy()
