"""Writes the contents of a bundle: graph and weights, networks, tokenizer, routers; and describes them in a manifest.

Called by `pipeline.flow` once the graph is lowered; `bundle.store` then puts the folder in place.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import onnx_ir as ir

from tide_export import names
from tide_export.bundle.manifest import FLOAT32_KV, Manifest, Quantization, TensorInfo
from tide_export.bundle.model_info import ModelInfo, StateInfo
from tide_export.compose.cut import Pieces
from tide_export.config import TideConfig
from tide_export.data.sequences import load_tokenizer
from tide_export.errors import ConfigError, ModelError, UnsupportedModelError
from tide_export.lower.onnxruntime.packed import save_batch_networks
from tide_export.lower.tensorrt.lower import networks_for_tensorrt
from tide_export.model.source import SourceModel
from tide_export.pipeline.request import ExportRequest
from tide_export.routers.router_set import RouterSet
from tide_export.trace.attention.indexed import chosen_keys
from tide_export.trace.attention.masks import layer_masks
from tide_export.trace.rewriting import present
from tide_export.trace.tracer import OPSET
from tide_export.version import __version__

logger = logging.getLogger("tide_export")

INLINE_BYTES = 1024  # weights up to this size are in the graph's own file


def context_length(source: SourceModel, max_length: int | None) -> int:
    """Returns the most tokens of a sequence: `max_length`, at most what the graph is exact for.

    Raises:
        ConfigError: `max_length` is out of range, or the model sets no bound and none is given.
        UnsupportedModelError: the model attends in a way that cannot be exported.
    """
    limit, why = source.context_length, "the model's context"
    if limit is not None and limit == source.longrope_length:
        why = "longer ones would change the rotary angles of tokens already cached (longrope)"
    blocks = [mask.size for mask in layer_masks(source.model, source.num_layers) or () if mask and mask.kind == "chunk"]
    if blocks and (limit is None or min(blocks) < limit):
        limit, why = min(blocks), "layers attend in blocks of that many tokens"
    chosen = min(chosen_keys(source.model).values(), default=limit)
    if chosen is not None and (limit is None or chosen < limit):
        limit, why = chosen, "longer ones would attend to chosen tokens only"
    if max_length is None:
        if limit is None:
            raise ConfigError(f"{source.name} sets no context length of its own: give --max-length")
        if limit != getattr(source.text_config, "max_position_embeddings", None):
            logger.warning("the bundle holds sequences of at most %d tokens: %s", limit, why)
        return limit
    if max_length < 2 or (limit is not None and max_length > limit):
        raise ConfigError(f"max_length must lie in 2..{limit or 'any'} ({why}), not {max_length}")
    return max_length


def write_contents(
    folder: Path,
    request: ExportRequest,
    graph: ir.Model,
    manifest: Manifest,
    pieces: Pieces,
    routers: RouterSet,
    lower: Callable[[ir.Model], ir.Model],
) -> None:
    """Writes what every bundle holds: the graph, composed of `pieces` and lowered by `lower`, networks for batches of
    sequences where there can be such, tokenizer and routers."""
    save_graph(graph, folder, manifest)
    try:
        save_batch_networks(folder, pieces, routers.arrays(), routers.lens_arrays(), lower=lower)
    except UnsupportedModelError as error:
        logger.warning("the bundle will take one prompt at a time: no networks for batches of this model: %s", error)
    save_tokenizer(request, folder)
    routers.save(folder / names.ROUTERS_FILE)


def write_networks(
    folder: Path, request: ExportRequest, manifest: Manifest, pieces: Pieces, routers: RouterSet, source: SourceModel
) -> Manifest:
    """Writes the segment networks, if `request` has a target that takes them; returns the manifest with them."""
    if request.flavour is None:
        return manifest
    weights, length = request.network_weights(source.exact_in), present(manifest.model.context_length)
    networks = networks_for_tensorrt(pieces, routers.arrays(), routers.lens_arrays(), length, weights, source.quantized)
    networks.save(folder)
    info = networks.info(manifest, request.max_batch_size)
    return replace(manifest, targets=("onnxruntime", request.flavour.name), networks=info)


def save_graph(graph: ir.Model, folder: Path, manifest: Manifest) -> None:
    """Writes model.onnx, and every weight of more than INLINE_BYTES to model.onnx.data.

    Two weights that share an array under two shapes (a quantized head tied to the embedding) are written once. The
    graph records the fields of `manifest` that a runtime compares (see `Manifest.graph_metadata`).
    """
    graph.metadata_props.update(manifest.graph_metadata)
    shared = _shared_weights(graph)
    if not shared:
        ir.save(graph, folder / names.GRAPH_FILE, external_data=names.WEIGHTS_FILE, size_threshold_bytes=INLINE_BYTES)
        return
    weights = graph.graph.initializers
    tensors = {name: value.const_value for name, value in weights.items()}
    try:
        for name in shared:
            weights[name].const_value = ir.tensor(np.zeros(0, np.uint8), name=name)  # until its owner is stored
        ir.external_data.unload_from_model(graph, folder, names.WEIGHTS_FILE, size_threshold_bytes=INLINE_BYTES)
        for name, owner in shared.items():
            stored, tensor = weights[owner].const_value, tensors[name]
            assert isinstance(stored, ir.ExternalTensor)
            assert tensor is not None
            weights[name].const_value = ir.ExternalTensor(
                stored.location,
                stored.offset,
                stored.length,
                tensor.dtype,
                shape=ir.Shape(tensor.shape.numpy()),
                name=name,
            )
        ir.save(graph, folder / names.GRAPH_FILE)
    finally:  # as `ir.save` does: the caller's graph is not changed
        for name, tensor in tensors.items():
            weights[name].const_value = tensor


def _shared_weights(graph: ir.Model) -> dict[str, str]:
    """Weights that share another weight's array under another shape, by name, each with the other's name."""
    first: dict[tuple[int, int], str] = {}
    shared: dict[str, str] = {}
    for name, value in graph.graph.initializers.items():
        array = value.const_value.raw if isinstance(value.const_value, ir.Tensor) else None
        if isinstance(array, np.ndarray) and array.nbytes > INLINE_BYTES:
            owner = first.setdefault((array.ctypes.data, array.nbytes), name)
            if owner != name:
                shared[name] = owner
    return shared


def save_tokenizer(request: ExportRequest, folder: Path) -> None:
    """Copies the model's tokenizer, never its code; without one the bundle is for callers that bring token ids."""
    try:
        tokenizer = load_tokenizer(request.model, request.trust_remote_code)
        if not tokenizer.is_fast:
            raise ModelError(f"the tokenizer of model {request.model!r} is Python code")
        type(tokenizer)._auto_class = None  # transformers would copy a module of the model's own
        tokenizer.save_pretrained(folder)
    except ModelError as error:
        # As text: a handler that keeps records would keep the traceback with it, and so the model.
        logger.warning("the bundle has no tokenizer, only token ids can be given to it: %s", str(error))


def make_manifest(
    source: SourceModel,
    routers: RouterSet,
    config: TideConfig,
    pieces: Pieces,
    graph: ir.Model,
    length: int,
    half: str | None = None,
) -> Manifest:
    """Returns the manifest of a bundle with the graph that was composed of `pieces`, without its files.

    Args:
        half: as given to `lower_for_onnxruntime`.
    """
    shares = pieces.kv_layers != tuple(range(source.num_layers))
    return Manifest(
        model=ModelInfo(
            name=source.name,
            architecture=source.architecture,
            weights_sha256=source.weights_sha256,
            num_layers=source.num_layers,
            hidden_size=pieces.state_size,
            vocab_size=source.vocab_size,
            context_length=length,
            eos_token_ids=source.eos_token_ids,
            kv_shapes=pieces.kv_shapes,
            kv_layers=pieces.kv_layers if shares else None,
            states=tuple(StateInfo(one.layer, one.number, one.shape, one.undo) for one in pieces.states) or None,
        ),
        checkpoints=routers.checkpoints,
        thresholds=(config.exit_threshold,) * len(routers.checkpoints),
        min_layers=config.min_layers,
        max_pending=config.max_pending,
        kv_cache_strategy=config.kv_cache_strategy,
        compaction_threshold=config.compaction_threshold,
        kv_cache=None if config.kv_cache == FLOAT32_KV else config.kv_cache,
        weights=_weights(source, half),
        targets=("onnxruntime",),
        opset=OPSET,
        inputs=tuple(_tensor_info(value) for value in graph.graph.inputs),
        outputs=tuple(_tensor_info(value) for value in graph.graph.outputs),
        calibration=routers.provenance or None,
        versions={
            "tide_export": __version__,
            **_versions("torch", "transformers", "onnxscript", "onnx-ir", "onnxruntime"),
        },
        quantization=_quantization(source),
        remote_code=source.remote_code or None,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _quantization(source: SourceModel) -> Quantization | None:
    return None if source.quantized is None else source.quantized.settings


def _weights(source: SourceModel, half: str | None) -> str:
    settings = _quantization(source)
    if settings is not None:
        return f"int{settings.bits}"
    return half or "fp32"


def _tensor_info(value: ir.Value) -> TensorInfo:
    assert value.name is not None
    assert value.dtype is not None
    assert value.shape is not None
    shape = tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape)
    return TensorInfo(value.name, value.dtype.numpy().name, shape)


def _versions(*packages: str) -> dict[str, str]:
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
