"""Dequantizes the weights of a bundle, so that the reference computes with the same values.

`validate` writes them into the source model; `float32_engine` runs the bundle's networks with matmuls in float32, where
it must equal that reference token for token.
"""

import tempfile
from collections.abc import Iterable, Iterator
from mmap import mmap
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from tide_export.bundle.file_names import BATCH_FOLDER, GRAPH_FILE, WEIGHTS_FILE
from tide_export.bundle.manifest import INT8_KV, INT8_MATMULS, SOURCE_INTEGERS
from tide_export.bundle.opened import Bundle
from tide_export.bundle.plan_fields import FP8
from tide_export.errors import BundleError
from tide_export.graph.rewriting import HALF
from tide_export.lower.onnxruntime.layers import inline_layers
from tide_export.model.fp4_matrices import Mxfp4Matrix
from tide_export.model.quantized_weights import Blocks
from tide_export.model.source import SourceModel
from tide_export.names.operators import (
    INTEGER_EXPERTS,
    INTEGER_MATMULS,
    OP_GATED_MATMUL,
    OP_MXFP4_EXPERTS,
    WEIGHTS_METADATA,
)
from tide_export.names.step_graph import DRAFT_HEAD_FUSION
from tide_export.quantize.fp8 import round_to_fp8
from tide_export.quantize.half import round_to_half
from tide_export.quantize.matrices import Change, find_matrices, own_head, own_head_name
from tide_export.runtime.engine import Engine, open_engine
from tide_export.verify.parity import TOLERANCES, EngineUnderTest

FLOAT32_MATMULS = 1  # accuracy_level of MatMulNBits
PLAIN_OR_GATED = [name for plain in INTEGER_MATMULS for name in (plain, OP_GATED_MATMUL[plain])]
ALL_INTEGER_MATMULS = [*PLAIN_OR_GATED, *INTEGER_EXPERTS]


def restore(source: SourceModel, bundle: Bundle) -> float | None:
    """Overwrites the weights of `source` with those of the bundle, if they differ.

    Returns:
        The relative error: the root of the squared differences over the squared weights; None: they do not differ.

    Raises:
        BundleError: the graph's quantized matrices are not those of this model.
    """
    if (weights := bundle.manifest.weights) in HALF:
        return None if weights in source.exact_in else round_to_half(source, weights)
    networks = bundle.manifest.networks
    if networks is not None and networks.matrices == FP8:
        return round_to_fp8(source, HALF[networks.weights].numpy())
    settings = bundle.manifest.quantization
    if settings is None or settings.method == SOURCE_INTEGERS:
        return None
    head = own_head_name(source)
    if any(names == [head] for names, _ in stored_matrices(bundle)):
        own_head(source)
    rows = {matrix.name: matrix for matrix in find_matrices(source).all()}
    change, done = Change(), set[str]()
    for names, whole in stored_matrices(bundle):
        if names == [DRAFT_HEAD_FUSION]:  # belongs to a draft head, not to the model
            continue
        if any(name not in rows for name in names):
            unknown = next(name for name in names if name not in rows)
            raise BundleError(f"bundle '{bundle.path}' has a quantized matrix {unknown} that {source.name} has not")
        if done.issuperset(names):
            continue  # a shared embedding and head
        if sum(rows[name].rows for name in names) != whole.rows or {rows[n].columns for n in names} != {whole.inputs}:
            raise BundleError(
                f"bundle '{bundle.path}': the quantized matrix {names[0]} is of another size than its model's"
            )
        for name, part in zip(names, whole.split([rows[name].rows for name in names]), strict=True):
            rows[name].write(part.values(), change)
        done.update(names)
    if not done:
        raise BundleError(f"bundle '{bundle.path}' has no quantized matrix, though its manifest says so")
    return change.relative


def computes_in_float32(bundle: Bundle) -> bool:
    """Whether the graph's matmuls do not round their inputs to 8 bits."""
    settings = bundle.manifest.quantization
    return settings is None or settings.accuracy_level != INT8_MATMULS


def float32_engine(bundle: Bundle, threads: int | None = None) -> Engine:
    """Opens the bundle's networks with quantized matmuls computed in float32; raises as `load`."""
    with tempfile.TemporaryDirectory() as graphs:
        (Path(graphs) / BATCH_FOLDER).mkdir()
        for file in (file for file in bundle.manifest.files if file.startswith(f"{BATCH_FOLDER}/")):
            proto = ir.to_proto(_graph(bundle, file))
            for function in proto.functions:
                if function.name in ALL_INTEGER_MATMULS:
                    function.name += "Function"
                    _as_functions(function.node)
            _set_level(proto.graph)
            (Path(graphs) / file).write_bytes(proto.SerializeToString())
        return open_engine(bundle, "cpu", threads, graphs=graphs)


def graph_engines(bundle: Bundle, threads: int | None) -> Iterator[EngineUnderTest]:
    """Opens the engines to compare for a bundle's graph, each when it is asked for.

    A graph whose matmuls round their inputs to 8 bits is first compared with matmuls in float32, which shows that
    integers, scales and all other operators are right, and then unchanged, within that rounding.
    """
    float32 = TOLERANCES["fp32" if bundle.manifest.kv_dtype != INT8_KV else "int8 K/V"]
    if computes_in_float32(bundle):
        yield EngineUnderTest("", open_engine(bundle, "cpu", threads), float32)
        return
    yield EngineUnderTest("float32 matmuls", float32_engine(bundle, threads), float32, as_deployed=False)
    yield EngineUnderTest("", open_engine(bundle, "cpu", threads), TOLERANCES["int8 matmuls"])


def _set_level(graph: onnx.GraphProto) -> None:
    _as_functions(graph.node)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _set_level(attribute.g)
            elif attribute.name == "accuracy_level":
                attribute.i = FLOAT32_MATMULS


def _as_functions(nodes: Iterable[onnx.NodeProto]) -> None:
    """Renames calls of integer matmuls to functions, as no operator is named, which use MatMulNBits."""
    for node in nodes:
        if node.op_type in ALL_INTEGER_MATMULS:
            node.op_type += "Function"


def _graph(bundle: Bundle, file: str = GRAPH_FILE) -> ir.Model:
    """Loads a graph of the bundle, its layers as nodes."""
    model = ir.from_proto(onnx.load_model_from_string(bundle.file(file).read_bytes()))
    inline_layers(model)
    return model


def stored_matrices(bundle: Bundle) -> Iterator[tuple[list[str], Blocks]]:
    """Yields the quantized matrices of the graph, each with the names of the parameters in its rows."""
    with bundle.file(WEIGHTS_FILE).mapped() as weights:
        for node in _graph(bundle).graph.all_nodes():
            if node.op_type not in ("MatMulNBits", *ALL_INTEGER_MATMULS, "GatherBlockQuantized"):
                continue
            experts = node.op_type in INTEGER_EXPERTS
            indices = (0, 2, 3) if node.op_type == "GatherBlockQuantized" else (2, 3, 4) if experts else (1, 2, 3)
            arrays = [_array(node.inputs[i], weights) if i < len(node.inputs) else None for i in indices]
            packed, scales, last = arrays
            zeros, outliers = (None, last) if node.op_type in ALL_INTEGER_MATMULS else (last, None)
            if packed is None or scales is None or WEIGHTS_METADATA not in node.metadata_props:
                raise BundleError(f"bundle '{bundle.path}': node {node.name} does not name its weights")
            bits = node.attributes["bits"].as_int()
            columns = node.attributes.get_int("K", 0)
            names = node.metadata_props[WEIGHTS_METADATA].split("\n")
            if experts:
                packed, scales = (array.reshape(-1, *array.shape[2:]) for array in (packed, scales))
            if node.op_type == OP_MXFP4_EXPERTS:
                matrix = Mxfp4Matrix(packed, scales)
                packed, scales, bits = matrix.packed, matrix.scales, matrix.bits
            if node.op_type == "GatherBlockQuantized":
                packed = packed.reshape(len(packed), scales.shape[1], -1)
                columns = _columns(node, weights) or scales.shape[1] * node.attributes["block_size"].as_int()
            yield names, Blocks(packed, scales, zeros, columns, bits, outliers)


def _columns(gather: ir.Node, weights: mmap | bytes) -> int | None:
    """Returns the columns that the graph slices from a gather, if it cuts the last block."""
    users = [use.node for use in gather.outputs[0].uses()]
    if len(users) != 1 or users[0].op_type != "Slice":
        return None
    end = _array(users[0].inputs[2], weights)
    return None if end is None else int(end[0])


def _array(value: ir.Value | None, weights: mmap | bytes) -> np.ndarray | None:
    """Returns the constant `value`; `weights` is the content of the external weights' file."""
    tensor = None if value is None else value.const_value
    if isinstance(tensor, ir.ExternalTensor):
        return np.ndarray(tensor.shape.numpy(), tensor.dtype.numpy(), weights, tensor.offset or 0)
    return None if tensor is None else tensor.numpy()
