"""Engines of the tiny models in `families`, through the stages of `pipeline.flow.export`: what the parity tests run."""

import fcntl
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from families import build
from tiny_configs import CHECKPOINTS, CONTEXT

from tide_export.bundle.file_names import SEGMENTS_FOLDER
from tide_export.bundle.manifest import CUDA, FLOAT32_KV
from tide_export.bundle.opened import Bundle, open_bundle
from tide_export.bundle.store import write_manifest, writing_bundle
from tide_export.calibration.config import TideConfig
from tide_export.compose.cut import Pieces, cut
from tide_export.compose.step_graph import compose
from tide_export.lower.cuda.lower import networks_for_cuda
from tide_export.lower.onnxruntime.lower import lower_for_onnxruntime
from tide_export.lower.onnxruntime.packed import save_batch_networks
from tide_export.lower.tensorrt.lower import networks_for_tensorrt
from tide_export.model.source import SourceModel
from tide_export.pipeline import pieces as pipeline_pieces
from tide_export.pipeline.contents import make_manifest, save_graph
from tide_export.pipeline.preflight import context_length
from tide_export.routers.random_routers import random_routers
from tide_export.routers.router_set import RouterSet
from tide_export.runtime.engine import Engine, load, open_engine
from tide_export.runtime.tensorrt.flavours import FLAVOURS
from tide_export.trace.tracer import TracedModel


def bound(source: SourceModel) -> int:
    """Tokens of the family's sequences; CONTEXT where the model sets no bound of its own."""
    return context_length(source, None if source.context_length else CONTEXT)


def pieces_of(
    source: SourceModel,
    checkpoints: tuple[int, ...],
    traces: Callable[..., TracedModel] | None = None,
) -> Pieces:
    """`source` traced, from the store of traces where it has one, and cut."""
    return cut((traces or pipeline_pieces.trace)(source, checkpoints, bound(source)), bound(source))


def engine_of(*arguments: Any, **options: Any) -> Engine:
    """An engine on one thread, on the bundle that `bundle_of` makes of the arguments."""
    return open_engine(bundle_of(*arguments, **options), "cpu", threads=1)


def bundle_of(
    source: SourceModel,
    routers: RouterSet,
    folder: Path,
    pieces: Pieces | None = None,
    half: str | None = None,
    kv_cache: str = FLOAT32_KV,
) -> Bundle:
    """`source` with `routers` as a bundle, through the stages of `pipeline.flow.export`; weights in `half`, bf16 or
    fp16; K/V of the type `kv_cache`."""
    pieces = pieces or pieces_of(source, routers.checkpoints)
    lower = partial(lower_for_onnxruntime, quantized=source.quantized, half=half, kv_cache=kv_cache)
    graph = lower(compose(pieces, routers.arrays(), routers.lens_arrays()))
    config = TideConfig(kv_cache=kv_cache)
    manifest = make_manifest(source, routers, config, pieces, graph, bound(source), half)
    with writing_bundle(folder) as temporary:
        save_graph(graph, temporary, manifest)
        weights = routers.arrays(), routers.lens_arrays()
        save_batch_networks(temporary, pieces, *weights, None, lower, manifest.graph_metadata)
        routers.save(temporary / "routers.safetensors")
        write_manifest(temporary, manifest)
    return open_bundle(folder)


MAX_TOKENS, MAX_LOGITS = 33, 8  # of a run of a segment network: longer prompts take several; 16 may be pending
MAX_BATCH_SIZE, SLOT_TOKENS = 3, 4  # of a run over several sequences


def segments_of(
    source: SourceModel,
    routers: RouterSet,
    folder: Path,
    pieces: Pieces,
    weights: str = "fp32",
    target: str = "tensorrt",
) -> Bundle:
    """The same as networks of one segment each, into the bundle that `engine_of` wrote at `folder`."""
    folds = FLAVOURS[target].folds_queries if target in FLAVOURS else False
    lower = networks_for_cuda if target == CUDA else partial(networks_for_tensorrt, folds_queries=folds)
    arguments = pieces, routers.arrays(), routers.lens_arrays(), bound(source), weights, source.quantized
    networks, manifest = lower(*arguments), open_bundle(folder).manifest
    shutil.rmtree(folder / SEGMENTS_FOLDER, ignore_errors=True)  # networks for another target
    networks.save(folder)
    info = replace(networks.info(manifest, MAX_BATCH_SIZE), max_tokens=MAX_TOKENS, max_logits=MAX_LOGITS)
    info = replace(info, max_slot_tokens=networks.slot_tokens or SLOT_TOKENS)
    write_manifest(folder, replace(manifest, targets=("onnxruntime", target), networks=info))
    return open_bundle(folder)


@dataclass(frozen=True)
class TinyLlama:
    """A model with random routers, and its bundle: as a graph, as networks for batches and as segment networks."""

    source: SourceModel
    routers: RouterSet
    exact: Path

    def graph(self, folder: Path) -> Engine:
        return load(folder, provider="cpu", threads=1)

    def networks(self) -> Engine:
        return open_engine(open_bundle(self.exact), "cpu-networks", threads=1)


def lens_at_first(routers: RouterSet) -> RouterSet:
    """`routers` with a lens at the first checkpoint alone."""
    first = min(routers.lenses)
    return RouterSet(routers.routers, routers.provenance, {first: routers.lenses[first]})


def tiny_llama_at(folder: Path, ids: Sequence[int], traces: Callable[..., TracedModel]) -> TinyLlama:
    """The bundle in `folder`, which is made where it is missing. `ids`: that the routers are made for; `traces`: as of
    `pieces_of`."""
    source = build("llama")
    routers = random_routers(source, CHECKPOINTS, ids, bottleneck=16, lens_rank=4)
    tiny = TinyLlama(source, routers, folder / "exact")
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not tiny.exact.exists():
            pieces, made = pieces_of(source, CHECKPOINTS, traces=traces), folder / "made"
            shutil.rmtree(made, ignore_errors=True)
            engine_of(source, routers, made, pieces)
            segments_of(source, routers, made, pieces)
            made.rename(tiny.exact)
    return tiny
