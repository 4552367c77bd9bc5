"""Traces a source model into one flat ONNX graph with markers at its checkpoints.

The graph takes input_ids and position_ids [B, S] and gives logits [B, S, V]. Identity-like `tide::TideMarker`
markers come after the embedding (layer 0), at each checkpoint, after the last layer, and before the head (optionally
also before every other layer); `compose.cut` cuts there. The opset is exactly 23: at any other, the exporter's rules no
longer recognise hand-written RMSNorm and rotary code. The trace has no control flow and no cache: `compose` adds both.
"""

import contextlib
import inspect
import io
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import onnx_ir as ir
import torch
from torch import nn
from torch.fx import config as fx_config
from transformers import PreTrainedModel

from tide_export.errors import TraceError
from tide_export.graph.builder import OPSET
from tide_export.graph.rewriting import nodes_of
from tide_export.model.failures import refuse_trace
from tide_export.model.outputs import first_tensor, hidden_of, with_first_tensor, with_hidden
from tide_export.model.quantized_weights import QuantizedWeights
from tide_export.model.source import SourceModel
from tide_export.names.operators import DOMAIN, OP_ATTENTION, OP_MARKER, STATE_OPERATORS
from tide_export.trace.attention.interface import refuse_ignored_attention, symbolic_attention
from tide_export.trace.attention.joined import JoinedAttentionPass
from tide_export.trace.attention.masks import Mask, layer_masks
from tide_export.trace.attention.matching import ExplicitAttentionPass, symbolic_sdpa
from tide_export.trace.expert_loops import single_iterations, store_stacked
from tide_export.trace.experts import symbolic_experts
from tide_export.trace.exporter import complex_ops  # noqa: F401 (registers its operators)
from tide_export.trace.exporter.decompositions import minimal_decompositions
from tide_export.trace.exporter.exact_constants import exact_constants
from tide_export.trace.lora import symbolic_lora
from tide_export.trace.offloaded_weights import placeholder_weights, read_when_written
from tide_export.trace.passthrough_cache import cache_layers, passthrough_cache
from tide_export.trace.quantized_linear import symbolic_quantized
from tide_export.trace.recurrence import keeps_state, refuse_unknown_state, symbolic_recurrence
from tide_export.trace.running_layer import running_layers
from tide_export.trace.static_rope import static_rope
from tide_export.trace.symbolic import symbolic

DEFAULT_LENGTH = 2048  # tokens that attention biases are stored for if neither the model nor the caller sets a bound


@dataclass(frozen=True)
class TracedModel:
    """A traced model.

    Attributes:
        model: inputs input_ids and position_ids, int64 [B, S]; output logits, float32 [B, S, V].
        boundaries: layers run at the markers between segments: (0, checkpoints ..., depth).
        every_layer: there is a marker before every layer.
        architecture: the model's class, for messages.
    """

    model: ir.Model
    boundaries: tuple[int, ...]
    every_layer: bool = False
    architecture: str = "the model"

    @property
    def head_marker(self) -> int:
        """The `layer` attribute of the marker before the head."""
        return self.boundaries[-1] + 1

    def marker(self, layer: int) -> ir.Node:
        markers = nodes_of(self.model.graph, OP_MARKER, DOMAIN)
        return next(node for node in markers if node.attributes["layer"].as_int() == layer)


def trace(
    source: SourceModel,
    checkpoints: Sequence[int],
    max_length: int | None = None,
    every_layer: bool = False,
    lora_rank: int = 0,
) -> TracedModel:
    """Traces `source` with markers at `checkpoints` (layers run).

    Args:
        max_length: longest sequence the graph will run on, in tokens; by default the model's context.
        every_layer: put markers before the other layers too.
        lora_rank: rank of the low-rank adapters that the layers have room for; 0: none.

    Raises:
        UnsupportedModelError: the architecture cannot be traced; the message names what it lacks.
        TraceError: the exporter failed, or lost an attention op or a marker.
    """
    refuse_unknown_state(source)
    depth = source.num_layers
    boundaries = (0, *checkpoints, depth)
    masks = layer_masks(source.model, source.structure.layers)
    with (
        placeholder_weights(source) as placeholders,
        symbolic_lora(source, lora_rank),
        symbolic_operators(source.model, masks, source.quantized),
        running_layers(source.structure.layers),
        symbolic_recurrence(source.model),
        _markers(source, range(depth + 1) if every_layer else boundaries),
    ):
        # Two rows of three tokens: a sample dimension of 1 would be taken for a constant.
        device = next(source.model.get_input_embeddings().parameters()).device
        ids = torch.zeros((2, 3), dtype=torch.long, device=device)
        positions = torch.arange(3, device=device).expand(2, 3).contiguous()
        forward = _TracedForward(source, cached=masks is not None)
        inputs = {"input_ids": ids, "position_ids": positions}
        model = export_graph(forward, inputs, ["logits"], source.model, source.name)
    _merge_views(model)
    read_when_written(model, source, placeholders)
    if masks is None and not _only_recurs(model):
        length = max_length or source.context_length or DEFAULT_LENGTH
        ExplicitAttentionPass(length, source.architecture)(model)
    JoinedAttentionPass()(model)
    _number_attentions(model, depth)
    traced = TracedModel(model, boundaries, every_layer, source.architecture)
    _check(source, traced)
    return traced


@contextmanager
def symbolic_operators(
    model: PreTrainedModel, masks: Sequence[Mask | None] | None, quantized: QuantizedWeights | None
) -> Iterator[None]:
    """While open, `model` emits symbolic attention, experts and products with quantized matrices.

    Args:
        masks: of its layers; None where it computes attention itself.
    """
    with (
        symbolic_sdpa() if masks is None else symbolic_attention(model, masks),
        symbolic_experts(model, quantized.blocks if quantized is not None else ()),
        single_iterations(model),
        symbolic_quantized(model, quantized),
        static_rope(model),
    ):
        yield


class _TracedForward(nn.Module):
    """The model's forward with the graph's two inputs and one output.

    Args:
        cached: whether to give the model a cache, which one that computes attention itself would size its masks by.
    """

    def __init__(self, source: SourceModel, cached: bool):
        super().__init__()
        self.model: PreTrainedModel = source.model
        self.first_position = source.structure.first_position
        self.cache_layers = cache_layers(source)
        self.cached = cached
        self.use_cache = cached and not keeps_state(source)  # with it, some write states into their modules
        parameters = inspect.signature(source.model.forward).parameters.values()
        self.any_option = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self.options = {parameter.name for parameter in parameters}

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        cache = passthrough_cache(self.cache_layers) if self.cached else None
        position_ids = position_ids + self.first_position if self.first_position else position_ids
        options = {"position_ids": position_ids, "past_key_values": cache, "use_cache": self.use_cache}
        taken = {name: value for name, value in options.items() if self.any_option or name in self.options}
        return self.model(input_ids=input_ids, **taken).logits


def export_graph(
    module: nn.Module, inputs: Mapping[str, torch.Tensor], outputs: Sequence[str], model: PreTrainedModel, name: str
) -> ir.Model:
    """Exports `module`, whose first two dimensions of every input are dynamic.

    Args:
        inputs: samples by name, in the order of the parameters of its forward.
        outputs: names of what it returns.
        model: whose code it runs, for messages, as `name`.

    Raises:
        UnsupportedModelError, TraceError: the exporter failed.
    """
    dynamic = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    try:
        with _quiet_exporter(), minimal_decompositions(), exact_constants():
            program = torch.onnx.export(
                module.eval(),
                tuple(inputs.values()),
                dynamo=True,
                opset_version=OPSET,
                input_names=list(inputs),
                output_names=list(outputs),
                dynamic_shapes=(dynamic,) * len(inputs),
                verbose=False,
            )
    except Exception as error:
        refuse_trace(model, error)
    if program is None:
        raise TraceError(f"torch.onnx.export gave no graph for {type(model).__name__} ({name})")
    exported = program.model.clone()
    store_stacked(exported)
    # onnxscript's rewrite rules live as long as the process and keep the last graph they matched: drop its weights.
    for value in program.model.graph.initializers.values():
        value.const_value = None
    return exported


def _merge_views(model: ir.Model) -> None:
    """Makes weights that are the same view of the same memory one: those of layers that run several times."""
    first: dict[tuple, ir.Value] = {}
    for name, value in list(model.graph.initializers.items()):
        if value.const_value is not None:
            array = value.const_value.numpy()
            one = first.setdefault((array.ctypes.data, array.shape, array.strides, array.dtype), value)
            if one is not value:
                value.replace_all_uses_with(one)
                del model.graph.initializers[name]


@contextmanager
def _markers(source: SourceModel, bounds: Sequence[int]) -> Iterator[None]:
    """Makes the model emit markers, while open.

    They come before the first layer, after as many layers as `bounds` says (the last one is the depth), and after the
    backbone.
    """
    structure, depth = source.structure, bounds[-1]

    def before_first(_module, args, kwargs):
        if args:
            return (mark(args[0], 0), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": mark(kwargs["hidden_states"], 0)}

    def mark(hidden: torch.Tensor, layer: int) -> torch.Tensor:
        return structure.by_stream(_mark(structure.by_token(hidden), layer))

    def after(layer: int) -> Callable:
        return lambda _module, _args, output: with_first_tensor(output, mark(first_tensor(output), layer))

    def after_backbone(_module, _args, output):
        return with_hidden(output, _mark(hidden_of(output), depth + 1))

    handles = [structure.layers[0].register_forward_pre_hook(before_first, with_kwargs=True)]
    handles += [structure.layers[layer - 1].register_forward_hook(after(layer)) for layer in bounds if layer]
    handles.append(structure.backbone.register_forward_hook(after_backbone))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _recurs(model: ir.Model) -> bool:
    return any(nodes_of(model.graph, op_type, DOMAIN) for op_type in STATE_OPERATORS)


def _only_recurs(model: ir.Model) -> bool:
    """Whether the traced layers keep recurrent states and none attends."""
    return _recurs(model) and not nodes_of(model.graph, "Softmax")


def _mark(hidden: torch.Tensor, layer: int) -> torch.Tensor:
    return symbolic(OP_MARKER, [hidden], {"layer": layer}, hidden.shape)


def _number_attentions(model: ir.Model, depth: int) -> None:
    """Adds the depth to the `layer` of an attention for each before it in the layer, as K/V is numbered."""
    before = Counter[int]()
    for node in nodes_of(model.graph, OP_ATTENTION, DOMAIN):
        layer = node.attributes["layer"].as_int()
        node.attributes["layer"] = ir.AttrInt64("layer", layer + depth * before[layer])
        before[layer] += 1


def _check(source: SourceModel, traced: TracedModel) -> None:
    """Checks that the trace holds every layer's attentions or state, and every marker once, in order."""
    attention, markers = (
        [node.attributes["layer"].as_int() for node in nodes_of(traced.model.graph, op_type, DOMAIN)]
        for op_type in (OP_ATTENTION, OP_MARKER)
    )
    depth = traced.boundaries[-1]
    layers = [number % depth for number in attention]
    if not _recurs(traced.model):  # of a model that does, some layers keep a state instead, or neither
        refuse_ignored_attention(source.model, len(set(layers)), depth)
    if layers != sorted(layers) or min(attention, default=0) < 0:
        raise TraceError(f"{source.architecture}: attention ops are traced for layers {layers}, not 0..{depth - 1}")
    expected = [*(range(depth + 1) if traced.every_layer else traced.boundaries), traced.head_marker]
    if markers != expected:
        raise TraceError(f"{source.architecture}: the trace holds markers {markers} instead of {expected}")


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Silences the exporter's advice about packages that are not used; errors still come as exceptions.

    Also turns off the Python stack trace that it would keep with every node of every pass, a tenth of its work.
    """
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    emitted = fx_config.do_not_emit_stack_traces
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        fx_config.do_not_emit_stack_traces = True
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            fx_config.do_not_emit_stack_traces = emitted
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
