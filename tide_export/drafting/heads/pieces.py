"""Traces a draft head and cuts it into the pieces that a drafter's networks are composed of."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.convenience as irc
import torch
from onnx_ir.passes import common as common_passes
from transformers import PreTrainedModel

from tide_export.compose.cut import is_attention
from tide_export.compose.drafter_networks import DrafterPieces
from tide_export.compose.passes.masked_fills import MaskedFillsPass
from tide_export.compose.passes.rotary_tables import RotaryTablesPass
from tide_export.compose.passes.shared_keys import KV_LAYER
from tide_export.compose.passes.static_reshapes import StaticReshapesPass
from tide_export.drafting.files import QUANTIZATION
from tide_export.drafting.heads.head import DraftHead
from tide_export.errors import DraftError, TideError, first_line
from tide_export.graph.builder import GraphBuilder, Weights
from tide_export.graph.rewriting import FLOAT, dims, nodes_of, rank, required, run_passes, static_dim, typed_value
from tide_export.model.quantized_weights import QuantizedWeights
from tide_export.names.operators import DOMAIN, OP_EXPERT_MATMUL, OP_QUANTIZED_MATMUL
from tide_export.names.step_graph import DRAFT_HEAD_FUSION
from tide_export.quantize.matrices import (
    EXPERT_COUNTS,
    MIN_SIZE,
    Matrix,
    expert_weights,
    is_linear,
    parameter_names,
)
from tide_export.routers.drafter_weights import CONFIDENCES
from tide_export.trace.tracer import export_graph, symbolic_operators

# Nobody measured what is accepted: as much as the head is confident, until the runtime has seen more.
ACCEPTANCE = tuple(float(share) for share in (np.array(CONFIDENCES) + np.array([*CONFIDENCES[1:], 1.0])) / 2)
LAYOUT = ("Reshape", "Transpose", "Slice", "Identity", "Cast")  # operators between attention and its values by token


@dataclass(frozen=True)
class _Size:
    """Holds the shape and the bits of a quantized matrix, for a trace."""

    rows: int
    columns: int
    bits: int = QUANTIZATION.bits


def head_pieces(head: DraftHead, max_tokens: int) -> DrafterPieces:
    """Traces `head` for sequences of at most `max_tokens` rows.

    Raises:
        DraftError: it cannot be traced, or attends otherwise than a drafter can.
    """
    try:
        return _pieces(head, max_tokens)
    except DraftError:
        raise
    except (TideError, ValueError) as error:
        raise DraftError(f"draft head {head.name!r} ({head.kind}) cannot be exported: {first_line(error)}") from error


def fuse_of(head: DraftHead, quantized: bool) -> ir.Graph | None:
    """Composes the head's input of the model's hidden states, if it reads several.

    Args:
        quantized: the matrix is among the model's quantized ones, as DRAFT_HEAD_FUSION, and not stored in the graph.
    """
    if head.fc is None:
        return None
    builder, (width, columns) = GraphBuilder("fuse", Weights()), head.fc.shape
    hidden = typed_value("hidden", FLOAT, ["batch", "tokens", columns])
    given, shape = hidden, ["batch", "tokens", width]
    if head.fc_epsilon is not None:
        ones = builder.weights.float32(f"{DRAFT_HEAD_FUSION}.norm", np.ones(columns, np.float32))
        norm = {"axis": -1, "epsilon": head.fc_epsilon}
        given = builder.op("RMSNormalization", [hidden, ones], norm, dtype=FLOAT, shape=dims(hidden))
    if quantized:
        attributes = {"weights": [DRAFT_HEAD_FUSION]}
        made = builder.op(OP_QUANTIZED_MATMUL, [given], attributes, domain=DOMAIN, dtype=FLOAT, shape=shape)
    else:
        weight = builder.weights.float32(f"{DRAFT_HEAD_FUSION}.T", head.fc.T.numpy())
        made = builder.op("MatMul", [given, weight], dtype=FLOAT, shape=shape)
    return builder.model("fuse", [hidden], {"states": made}).graph


def _pieces(head: DraftHead, max_tokens: int) -> DrafterPieces:
    matrices = {matrix.name: matrix for matrix in matrices_of(head.model)}
    model = _trace(head, matrices)
    run_passes(
        model,
        common_passes.CommonSubexpressionEliminationPass(),
        StaticReshapesPass(),
        MaskedFillsPass(),
        RotaryTablesPass(max_tokens),
        common_passes.RemoveUnusedNodesPass(),
    )
    graph = model.graph
    for value in graph.initializers.values():  # copies: the model's weights are freed before the drafter is written
        tensor = required(value.const_value)
        value.const_value = ir.tensor(np.array(tensor.numpy()), name=value.name)
    attention = [node for node in graph if is_attention(node)]
    if len(attention) != len(head.masks):
        raise DraftError(f"draft head {head.name!r} ({head.kind}) attends {len(attention)} times, not once a layer")
    kv_shape, *_ = shapes = [
        (node.attributes["kv_num_heads"].as_int(), node.attributes["head_dim"].as_int()) for node in attention
    ]
    for node, layer in zip(attention, head.kv_layers, strict=False):
        node.attributes[KV_LAYER] = ir.AttrInt64(KV_LAYER, layer)
        for index in (1, 2):
            node.replace_input_with(index, None)
    common_passes.RemoveUnusedNodesPass()(model)
    attend, propose = (graph, None) if head.block_size else _split(graph, attention[-1])
    if static_dim((propose or graph).outputs[0], -1) != len(head.tokens):
        raise DraftError(f"draft head {head.name!r} ({head.kind}) gives logits of other tokens than the model has")
    return DrafterPieces(
        attend,
        propose,
        kv_shape,
        head.tokens,
        ACCEPTANCE,
        {name: matrices[name].read().copy() for name in _used(graph)},  # the model is freed before they are written
        max_tokens,
        tuple(sorted(set(head.layers))),
        dict(sorted(zip(head.kv_layers, shapes, strict=False))),
        len(attention),
        head.block_size,
    )


def _trace(head: DraftHead, matrices: dict[str, Matrix]) -> ir.Model:
    sizes: Any = {name: _Size(*_shape(matrix)) for name, matrix in matrices.items()}
    inputs = {
        "embeddings": torch.zeros(2, 3, head.width),
        "states": torch.zeros(2, 3, head.width),
        "position_ids": torch.arange(3).expand(2, 3).contiguous(),
    }
    outputs = ["logits", "next_states"]
    if head.block_size:
        inputs["last"], outputs = torch.zeros(2, 3, dtype=torch.long), outputs[:1]
    with symbolic_operators(head.model, head.masks, QuantizedWeights(None, sizes)):
        return export_graph(head.step, inputs, outputs, head.model, head.name)


def matrices_of(model: PreTrainedModel) -> Iterable[Matrix]:
    """The matrices that are quantized: of linear modules but gates, and of experts."""
    names = parameter_names(model)
    gates = {getattr(model.config, name, None) for name in EXPERT_COUNTS}
    for module in model.modules():
        if is_linear(module):
            weight = module.get_parameter("weight")
            if min(weight.shape) >= MIN_SIZE and weight.shape[0] not in gates:
                yield Matrix(names[id(weight)], weight)
        for attribute in expert_weights(model, module):
            weight = getattr(module, attribute)
            for index in range(len(weight)):
                yield Matrix(f"{names[id(weight)]}.{index}", weight, bool(module.is_transposed), index)


def _shape(matrix: Matrix) -> tuple[int, int]:
    stored = matrix.parameter.shape if matrix.expert is None else matrix.parameter.shape[1:]
    rows, columns = stored[::-1] if matrix.transposed else stored
    return int(rows), int(columns)


def _used(graph: ir.Graph) -> list[str]:
    """Names of the matrices that the graph multiplies by."""
    plain = [node.attributes["weights"].as_strings()[0] for node in nodes_of(graph, OP_QUANTIZED_MATMUL, DOMAIN)]
    experts = [
        f"{node.attributes['weights'].as_strings()[0]}.{index}"
        for node in nodes_of(graph, OP_EXPERT_MATMUL, DOMAIN)
        if "weights" in node.attributes
        for index in range(node.attributes["num_experts"].as_int())
    ]
    return list(dict.fromkeys([*plain, *experts]))


def _split(graph: ir.Graph, attention: ir.Node) -> tuple[ir.Graph, ir.Graph]:
    """Cuts the graph after the last attention: what runs for every row, and what for rows that draft."""
    attended = attention.outputs[0]
    while rank(attended) != 3:
        (reader,) = {use.node for use in attended.uses()}
        if reader.op_type not in LAYOUT:
            raise DraftError(f"its attention is followed by {reader.op_type}, which is not understood")
        attended = reader.outputs[0]
    after, computed = {attended}, set(graph.inputs)  # values; `computed` from inputs, their shapes aside
    passed = [attended]  # from one piece to the other
    for node in graph:
        inputs = [value for value in node.inputs if value is not None]
        if node.op_type != "Shape" and not computed.isdisjoint(inputs):
            computed.update(node.outputs)
        if node.outputs[0] is not attended and not after.isdisjoint(inputs):
            after.update(node.outputs)
            passed += [value for value in inputs if value in computed and value not in after]
    passed = list(dict.fromkeys(passed))
    for value in passed:
        if value.dtype != FLOAT or rank(value) != 3:
            raise DraftError(f"what follows its attention reads more than hidden states ({value.name})")
    attend = irc.extract(graph, list(graph.inputs), passed)
    for value in graph.inputs:
        for node, index in list(value.uses()):
            if node.op_type == "Shape" and node.attributes.get_int("end", 2) in (1, 2):
                node.attributes["end"] = ir.AttrInt64("end", node.attributes.get_int("end", 2))
                node.replace_input_with(index, attended)
    attended.shape = ir.Shape([*dims(graph.inputs[0])[:2], static_dim(attended, -1)])
    return attend, irc.extract(graph, passed, list(graph.outputs))
