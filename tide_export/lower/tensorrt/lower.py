"""From the same cut, one strongly typed network per segment and one for the head: what TensorRT is given.

A conditional inside TensorRT saves no time and may not hold attention, so here the runtime decides which network runs
(`runtime.segmented.sequence` decides; `compose.step_graph` writes the same machine into one graph). Segment 0 embeds
token ids; every network but the last gives the new hidden states, and at each row's last token the state it would leave
with, the router's score and the exit flag; the last gives the states the model ends with, of all tokens, to verify
drafts. Lens and final norm stand in the segment, because the router reads what they give, and the head takes that.

The operators are standard ONNX, opset 24 (TensorScatter), and `TideRoute`, a function with a body: so ONNX Runtime runs
the very files TensorRT builds its engines from. Shapes: B rows and S new tokens are free, the K/V buffers have a fixed
length. Rows with fewer new tokens are padded on the right: what padding writes behind a row's length is overwritten
before it is seen.
"""

import logging
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.external_data import convert_tensors_to_external
from onnx_ir.passes import common as common_passes

from tide_export import names
from tide_export.bundle.manifest import Manifest, NetworksInfo
from tide_export.bundle.profiles import BATCH_SIZE, run_sizes
from tide_export.compose.builder import Block, Weights
from tide_export.compose.cut import Pieces, is_attention
from tide_export.compose.exits import leaving_state, route, token_dims
from tide_export.compose.router_op import normed_size, route_function
from tide_export.compose.step_graph import LensWeights, RouterWeights, check_routers
from tide_export.errors import UnsupportedModelError
from tide_export.lower.onnxruntime.packed import check_positions
from tide_export.lower.tensorrt.expert_gather import ExpertGatherPass, most_gathering
from tide_export.lower.tensorrt.half_precision import HalfPrecisionPass, check_weights
from tide_export.lower.tensorrt.scatter_attention import ScatterAttentionPass

logger = logging.getLogger("tide_export")

OPSET, IR_VERSION = 24, 11
BATCH, TOKENS = "batch", "tokens"
FLOAT, INT64, BOOL = ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.BOOL
# Standard operators up to opset 24 that the parser of TensorRT for RTX 1.7 does not take (a test asks it) and that a
# model of text could hold. NonZero it knows by name alone.
NOT_TAKEN = {
    *("Bernoulli", "BitCast", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Compress"),
    *("ConcatFromSequence", "ConvInteger", "CumProd", "DFT", "Det", "DynamicQuantizeLinear", "MatMulInteger"),
    *("Multinomial", "NonZero", "Optional", "OptionalGetElement", "OptionalHasElement", "QLinearMatMul"),
    *("SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength"),
    *("SequenceMap", "SplitToSequence", "SwiGLU", "Unique"),
}
EXTERNAL_BYTES = 1024  # smaller tensors stay in the .onnx
ALIGNMENT = 256  # bytes; of every address a network is given (see `runtime.segmented.device`)


@dataclass(frozen=True)
class Networks:
    """The networks of one model, by name: `names.segment(k)`, shallowest first, and `names.HEAD`.

    Attributes:
        weights: fp32, fp16 or bf16.
        capacity: tokens the K/V buffers hold, the longest sequence.
        exit_size: width D' of the states the head takes.
        max_tokens: tokens a run may take where that is fewer than anywhere else, because experts are gathered.
        apart: why sequences cannot be run together, if they cannot.
    """

    models: dict[str, ir.Model]
    weights: str
    capacity: int
    exit_size: int
    max_tokens: int | None = None
    apart: str | None = None

    def info(self, manifest: Manifest, rows: int = BATCH_SIZE) -> NetworksInfo:
        """What the manifest says of them, a warning where they will not take `rows` sequences at once.

        Args:
            manifest: of their bundle so far.
            rows: sequences that should be run together, at most.
        """
        apart = self.apart or self._unaligned(manifest)
        if apart is not None and rows > 1:
            logger.warning("the networks for TensorRT will take one prompt at a time: %s", apart)
        sizes = run_sizes(self.capacity, manifest.max_pending, 1 if apart else rows, self.max_tokens)
        return NetworksInfo(
            self.weights,
            self.capacity,
            sizes.max_tokens,
            sizes.max_logits,
            self.exit_size,
            sizes.max_batch_size,
            sizes.max_slot_tokens,
        )

    def _unaligned(self, manifest: Manifest) -> str | None:
        """Why a run cannot begin at any sequence of a batch, if it cannot: it is given the address of its K/V."""
        item = 4 if self.weights == "fp32" else 2
        for heads, width in manifest.model.kv_shapes:
            size = heads * self.capacity * width * item
            if size % ALIGNMENT:
                return (
                    f"the K/V of one, {size} bytes a layer, is no multiple of {ALIGNMENT}: make --max-length one of "
                    f"{ALIGNMENT // math.gcd(ALIGNMENT, heads * width * item)}"
                )
        return None

    def save(self, folder: Path) -> None:
        """Writes every network to `folder`/segments, with one file of weights that they share."""
        target = folder / names.SEGMENTS_FOLDER
        target.mkdir()
        large: dict[str, ir.TensorProtocol] = {}
        values = [value for model in self.models.values() for value in model.graph.initializers.values()]
        for value in values:
            tensor = value.const_value
            assert value.name is not None
            assert tensor is not None
            if tensor.nbytes >= EXTERNAL_BYTES:
                large.setdefault(value.name, tensor)
        stored = dict(
            zip(
                large,
                convert_tensors_to_external(list(large.values()), target, names.SEGMENTS_WEIGHTS_FILE),
                strict=True,
            )
        )
        for value in values:
            if value.name in stored:
                value.const_value = stored[value.name]
        for name, model in self.models.items():
            ir.save(model, folder / names.network_file(name))


def networks_for_tensorrt(
    pieces: Pieces, routers: RouterWeights, lenses: LensWeights | None, capacity: int, weights: str = "fp32"
) -> Networks:
    """The networks of `pieces`, ready to be saved.

    Args:
        capacity: tokens the K/V buffers hold; what `cut` was given as the longest sequence.
        weights: fp32, fp16 or bf16, of weights, states and K/V; routers and logits are float32 always.

    Raises:
        GraphError: a router or lens is missing or of another width.
        UnsupportedModelError: the model computes with something that is not made for TensorRT.
    """
    check_routers(pieces, routers, lenses)
    check_operators(pieces)
    narrow = HalfPrecisionPass(weights) if weights != "fp32" else None
    apart, models = None, {}
    try:
        for piece in (pieces.embed, *pieces.segments):
            check_positions(piece)
    except UnsupportedModelError as error:
        apart = str(error)
    for k in range(len(pieces.segments)):
        models[names.segment(k)] = _Segment(pieces, k, routers, lenses or {}, capacity).model()
    models[names.HEAD] = _head(pieces)
    bounds = []
    for model in models.values():
        if narrow is not None:
            narrow(model)
        bounds.append(most_gathering(model))
        ir.passes.Sequential(
            ScatterAttentionPass(),
            ExpertGatherPass(),
            common_passes.RemoveUnusedNodesPass(),
            common_passes.RemoveUnusedFunctionsPass(),
            common_passes.RemoveUnusedOpsetsPass(),
        )(model)
    max_tokens = min((bound for bound in bounds if bound is not None), default=None)
    return Networks(models, weights, capacity, normed_size(pieces), max_tokens, apart)


def check_pieces(pieces: Pieces, weights: str) -> None:
    """Raises what `networks_for_tensorrt` or writing its networks would; needs no routers.

    Raises:
        UnsupportedModelError: as `check_operators`.
        GraphError: a weight holds a number too large for `weights`.
    """
    check_operators(pieces)
    for piece in (pieces.embed, *pieces.segments, pieces.tail, pieces.head) if weights != "fp32" else ():
        check_weights(piece, weights)


def check_operators(pieces: Pieces) -> None:
    """Whether networks can be made of `pieces` at all; needs no routers, so it comes before they are fitted.

    Raises:
        UnsupportedModelError: naming an operator TensorRT does not take, and where the model computes with it.
    """
    symbols = {(names.DOMAIN, name) for name in (names.OP_ATTENTION, names.OP_EXPERT_MATMUL, names.OP_CHECKPOINT)}
    parts = {
        f"layers {a} to {b - 1}": s for (a, b), s in zip(pairwise(pieces.boundaries), pieces.segments, strict=True)
    }
    both = [node for graph in pieces.segments for node in graph if is_attention(node) and all(_added(node))]
    if both:
        layer = both[0].attributes["layer"].as_int()
        raise UnsupportedModelError(
            f"the attention of layer {layer} has sinks and a bias, which TensorRT does not take: use target onnxruntime"
        )
    for part, graph in {"embedding": pieces.embed, **parts, "final norm": pieces.tail, "head": pieces.head}.items():
        for node in graph.all_nodes():
            if (node.domain, node.op_type) in symbols or (not node.domain and node.op_type not in NOT_TAKEN):
                continue
            operator = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
            raise UnsupportedModelError(
                f"the model computes with {operator} (in its {part}), which TensorRT does not take: "
                "use target onnxruntime"
            )


class _Segment:
    """Segment k as a network of its own."""

    def __init__(self, pieces: Pieces, k: int, routers: RouterWeights, lenses: LensWeights, capacity: int):
        self.pieces, self.k, self.capacity = pieces, k, capacity
        self.layers = pieces.boundaries[k + 1]
        self.router = routers[self.layers] if k < len(pieces.segments) - 1 else None
        self.lens = lenses.get(self.layers) if self.router is not None else None
        self.block = Block(names.segment(k), Weights())
        self.lengths = _input(names.PAST_LENGTHS, INT64, [BATCH])
        self.last = _input(names.LAST_TOKENS, INT64, [BATCH])
        self.past = {
            (layer, kind): _input(names.past(layer, kind), FLOAT, [BATCH, heads, capacity, width])
            for layer in range(pieces.boundaries[k], pieces.boundaries[k + 1])
            for heads, width in [pieces.kv_shapes[layer]]
            for kind in ("key", "value")
        }

    def model(self) -> ir.Model:
        block, pieces, width = self.block, self.pieces, self.pieces.hidden_size
        first = self.k == 0
        entry = _input(names.INPUT_IDS, INT64, [BATCH, TOKENS]) if first else None
        x = entry if entry is not None else _input(names.HIDDEN_STATES, FLOAT, [BATCH, TOKENS, width])
        inputs = [x, self.lengths, self.last]
        positions = self._positions(x)
        if first:
            (x,) = block.inline(pieces.embed, [x, positions], token_dims(pieces.embed, BATCH, TOKENS))
        y, presents = self._layers(x, positions)
        if self.router is None:
            final = leaving_state(block, pieces, self.layers, None, y)
            outputs = {names.FINAL_STATES: final, names.EXIT_STATES: self._last_token(final)}
        else:
            leaving = leaving_state(block, pieces, self.layers, self.lens, self._last_token(y))
            threshold = _input(names.EXIT_THRESHOLD, FLOAT, [1])
            inputs.append(threshold)
            score, leaves = route(block, self.layers, self.router, leaving, threshold)
            # The function says bool and the plugin int32, as plugins may not give bool: either becomes what both are.
            shape = leaves.shape
            leaves = block.op("Cast", [leaves], {"to": ir.DataType.INT32.value}, dtype=ir.DataType.INT32, shape=shape)
            leaves = block.op("Cast", [leaves], {"to": BOOL.value}, dtype=BOOL, shape=shape)
            outputs = {names.NEW_HIDDEN_STATES: y, names.EXIT_STATES: leaving}
            outputs |= {names.ROUTER_SCORE: score, names.EXIT_FLAG: leaves}
        functions = [route_function(self.router, OPSET)] if self.router is not None else []
        return _model(names.segment(self.k), block, [*inputs, *self.past.values()], {**outputs, **presents}, functions)

    def _positions(self, x: ir.Value) -> ir.Value:
        """int64 [B, S]: each row's new tokens come behind those it has."""
        block, constant = self.block, self.block.weights.constant
        scalar = constant("scalar", np.array([], dtype=np.int64))
        zero, one = constant("zero", np.array(0, dtype=np.int64)), constant("one", np.array(1, dtype=np.int64))
        axis_0, axis_1 = constant("axis_0", np.array([0])), constant("axis_1", np.array([1]))
        count = block.op("Shape", [x], {"start": 1, "end": 2}, dtype=INT64, shape=[1])
        count = block.op("Reshape", [count, scalar], dtype=INT64, shape=[])
        steps = block.op("Range", [zero, count, one], dtype=INT64, shape=[TOKENS])
        steps = block.op("Unsqueeze", [steps, axis_0], dtype=INT64, shape=[1, TOKENS])
        start = block.op("Unsqueeze", [self.lengths, axis_1], dtype=INT64, shape=[BATCH, 1])
        positions = block.op("Add", [start, steps], dtype=INT64, shape=[BATCH, TOKENS])
        # Padding may reach beyond the last place; it must not reach beyond the tables read by position.
        last = constant("last_place", np.array(self.capacity - 1, dtype=np.int64))
        return block.op("Min", [positions, last], dtype=INT64, shape=[BATCH, TOKENS])

    def _layers(self, x: ir.Value, positions: ir.Value) -> tuple[ir.Value, dict[str, ir.Value]]:
        """y [B, S, D] and the buffers after the run, by name; every attention gets what ScatterAttentionPass reads."""
        block, piece = self.block, self.pieces.segments[self.k]
        places = block.weights.constant("places", np.arange(self.capacity, dtype=np.int64).reshape(1, 1, 1, -1))
        start = len(block.nodes)
        (y,) = block.inline(piece, [x, positions], token_dims(piece, BATCH, TOKENS))
        y.shape = ir.Shape([BATCH, TOKENS, self.pieces.hidden_size])
        presents = {}
        for node in block.nodes[start:]:
            if node.op_type != names.OP_ATTENTION:
                continue
            layer = node.attributes["layer"].as_int()
            sinks, bias = _added(node)
            buffers = [self.past[layer, kind] for kind in ("key", "value")]
            node.resize_inputs(10)
            for index, value in enumerate([*buffers, self.lengths, positions, places, sinks, bias]):
                node.replace_input_with(3 + index, value)
            node.resize_outputs(3)
            for kind, value, buffer in zip(("key", "value"), node.outputs[1:], buffers, strict=True):
                value.name, value.type, value.shape = f"{node.name}.{kind}", buffer.type, buffer.shape
                presents[names.present(layer, kind)] = value
        return y, presents

    def _last_token(self, states: ir.Value) -> ir.Value:
        """[B, S, D] -> [B, 1, D], at each row's last real token."""
        assert states.shape is not None
        block, width = self.block, states.shape[-1]
        axis = block.weights.constant("axis_1", np.array([1]))
        index = block.op("Unsqueeze", [self.last, axis], dtype=INT64, shape=[BATCH, 1])
        state = block.op("GatherND", [states, index], {"batch_dims": 1}, dtype=FLOAT, shape=[BATCH, width])
        return block.op("Unsqueeze", [state, axis], dtype=FLOAT, shape=[BATCH, 1, width])


def _head(pieces: Pieces) -> ir.Model:
    """Exit states [B, S, D'] -> logits [B, S, V]."""
    block = Block(names.HEAD, Weights())
    states = _input(names.EXIT_STATES, FLOAT, [BATCH, TOKENS, normed_size(pieces)])
    (logits,) = block.inline(pieces.head, [states], token_dims(pieces.head, BATCH, TOKENS))
    logits.type, logits.shape = ir.TensorType(FLOAT), ir.Shape([BATCH, TOKENS, pieces.vocab_size])
    return _model(names.HEAD, block, [states], {names.LOGITS: logits}, [])


def _model(
    name: str, block: Block, inputs: list[ir.Value], outputs: dict[str, ir.Value], functions: list[ir.Function]
) -> ir.Model:
    values = []
    for output, value in outputs.items():
        if value.producer() is None or value.name in outputs:
            value = block.op("Identity", [value], dtype=value.dtype, shape=value.shape)
        value.name = output
        values.append(value)
    graph = ir.Graph(
        inputs,
        values,
        nodes=block.nodes,
        initializers=list(block.weights.values.values()),
        opset_imports={"": OPSET, names.DOMAIN: 1},
        name=name,
    )
    return ir.Model(graph, ir_version=IR_VERSION, producer_name="tide_export", functions=functions)


def _added(attention: ir.Node) -> tuple[ir.Value | None, ir.Value | None]:
    """Sinks and bias of a traced attention."""
    _, _, _, sinks, bias = [*attention.inputs, None, None][:5]
    return sinks, bias


def _input(name: str, dtype: ir.DataType, shape: list) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
