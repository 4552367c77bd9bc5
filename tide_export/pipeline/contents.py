"""Writes the contents of a bundle: graph and weights, networks, tokenizer, routers, manifest.

`pipeline.flow` calls it with a lowered graph; `bundle.store` then moves the folder into place.
"""

import logging
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import onnx_ir as ir

from tide_export.bundle.file_names import GRAPH_FILE, ROUTERS_FILE, WEIGHTS_FILE
from tide_export.bundle.manifest import FLOAT32_KV, Manifest, Quantization, TensorInfo
from tide_export.bundle.model_info import ModelInfo
from tide_export.calibration.config import TideConfig
from tide_export.common.version import __version__
from tide_export.compose.cut import Pieces
from tide_export.data.sequences import load_tokenizer
from tide_export.errors import ModelError
from tide_export.graph.builder import OPSET
from tide_export.graph.rewriting import required
from tide_export.lower.cuda.kernels import check_kernels
from tide_export.lower.cuda.lower import networks_for_cuda
from tide_export.lower.onnxruntime.packed import save_batch_networks
from tide_export.lower.tensorrt.lower import networks_for_tensorrt
from tide_export.model.source import SourceModel
from tide_export.pipeline.request import ExportRequest
from tide_export.pipeline.weights import Lowering
from tide_export.routers.router_set import RouterSet

logger = logging.getLogger("tide_export")

INLINE_BYTES = 1024  # weights up to this size are stored in the graph's file


def write_contents(
    folder: Path,
    graph: ir.Model,
    manifest: Manifest,
    pieces: Pieces,
    routers: RouterSet,
    fuse: ir.Graph | None,
    lower: Lowering,
) -> None:
    """Writes the contents of every bundle but the tokenizer: graph, networks of its parts and routers.

    Args:
        graph: the lowered step graph.
        pieces, fuse: what it was composed of, for the networks.
        lower: lowers the networks.
    """
    save_graph(graph, folder, manifest)
    weights = routers.arrays(), routers.lens_arrays()
    save_batch_networks(folder, pieces, *weights, fuse, lower, manifest.graph_metadata)
    routers.save(folder / ROUTERS_FILE)


def write_networks(
    folder: Path, request: ExportRequest, manifest: Manifest, pieces: Pieces, routers: RouterSet, source: SourceModel
) -> Manifest:
    """Writes segment networks if `request` has a target for them; returns the updated manifest."""
    if request.network_target is None:
        return manifest
    weights, length = request.network_weights(source.exact_in), required(manifest.model.context_length)
    arguments = pieces, routers.arrays(), routers.lens_arrays(), length, weights, source.quantized
    if request.flavour is None:
        networks = networks_for_cuda(*arguments)
        check_kernels(networks.models)
    else:
        networks = networks_for_tensorrt(*arguments, request.flavour.folds_queries)
    networks.save(folder)
    info = replace(networks, cumulative=routers.cumulative).info(manifest, request.max_batch_size)
    return replace(manifest, targets=("onnxruntime", request.network_target), networks=info)


def save_graph(graph: ir.Model, folder: Path, manifest: Manifest) -> None:
    """Writes model.onnx, and every weight of more than INLINE_BYTES to model.onnx.data.

    Two weights that share an array with two shapes (a quantized head tied to the embedding) are written once. The graph
    records the fields of `manifest` that a runtime compares (see `Manifest.graph_metadata`).
    """
    graph.metadata_props.update(manifest.graph_metadata)
    shared = _shared_weights(graph)
    if not shared:
        ir.save(graph, folder / GRAPH_FILE, external_data=WEIGHTS_FILE, size_threshold_bytes=INLINE_BYTES)
        return
    weights = graph.graph.initializers
    tensors = {name: value.const_value for name, value in weights.items()}
    try:
        for name in shared:
            weights[name].const_value = ir.tensor(np.zeros(0, np.uint8), name=name)  # until its owner is stored
        ir.external_data.unload_from_model(graph, folder, WEIGHTS_FILE, size_threshold_bytes=INLINE_BYTES)
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
        ir.save(graph, folder / GRAPH_FILE)
    finally:  # leaves the caller's graph unchanged, as `ir.save` does
        for name, tensor in tensors.items():
            weights[name].const_value = tensor


def _shared_weights(graph: ir.Model) -> dict[str, str]:
    """Returns weight -> the other weight whose array it shares with another shape, by name."""
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
    """Copies the model's tokenizer without its code; a bundle without tokenizer takes only token ids."""
    try:
        tokenizer = load_tokenizer(request.model, request.trust_remote_code)
        if not tokenizer.is_fast:
            raise ModelError(f"the tokenizer of model {request.model!r} is Python code")
        type(tokenizer)._auto_class = None  # transformers would copy the model's Python module
        tokenizer.save_pretrained(folder)
    except ModelError as error:
        # As text: a handler that keeps records would keep the error's traceback, and so the model.
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
    """Returns the manifest, without files, of a bundle whose graph was composed of `pieces`.

    Args:
        half: the argument of `lower_for_onnxruntime`.
    """
    shares = pieces.kv_layers != tuple(range(len(pieces.kv_layers)))
    return Manifest(
        model=ModelInfo(
            name=source.name,
            architecture=source.architecture,
            weights_sha256=source.weights_sha256,
            num_layers=source.num_layers,
            hidden_size=pieces.carried_size,
            vocab_size=source.vocab_size,
            context_length=length,
            eos_token_ids=source.eos_token_ids,
            kv_shapes=pieces.kv_shapes,
            kv_layers=pieces.kv_layers if shares else None,
            states=pieces.states or None,
            lora=pieces.lora,
            loops=source.loops if source.loops > 1 else None,
        ),
        checkpoints=routers.checkpoints,
        thresholds=(config.exit_threshold,) * len(routers.checkpoints),
        min_layers=config.min_layers,
        max_pending=config.max_pending,
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
