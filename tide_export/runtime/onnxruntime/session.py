"""Opens a bundle's branched graph in ONNX Runtime on the CPU and checks its inputs and outputs."""

import logging
from typing import Any

from tide_export import names
from tide_export.bundle.manifest import EXACT, Manifest
from tide_export.bundle.opened import Bundle
from tide_export.runtime.onnxruntime.huge_pages import on_huge_pages
from tide_export.runtime.onnxruntime.library import (
    check_contract,
    import_onnxruntime,
    load_session,
    session_options,
)

logger = logging.getLogger("tide_export")


def open_session(bundle: Bundle, threads: int | None = None) -> Any:
    """The `onnxruntime.InferenceSession` of a bundle's graph on the CPU; safe to run from several threads at once.

    Args:
        threads: threads one step may use; None leaves it to ONNX Runtime (one per physical core).

    Raises:
        ProviderError: ONNX Runtime is not installed.
        ConfigError: threads below 1.
        BundleError: the graph does not load, or its inputs and outputs are not those of the manifest.
    """
    ort = import_onnxruntime()
    options, graph = session_options(ort, threads), bundle.file(names.GRAPH_FILE)
    with on_huge_pages():
        session = load_session(ort, graph, options)
    check_contract(session, graph_inputs(bundle.manifest), graph_outputs(bundle.manifest), str(graph))
    logger.info(
        "running '%s' with ONNX Runtime %s on the CPU, %s threads", bundle.path, ort.__version__, threads or "default"
    )
    return session


def graph_inputs(manifest: Manifest) -> set[str]:
    """Names of the inputs that a graph of this manifest must have."""
    segments = range(1, len(manifest.checkpoints) + 1)
    routing = {names.THRESHOLDS} if manifest.checkpoints else set()
    routing |= {names.skip_threshold(k) for k in segments}
    pending = {names.pending(k) for k in segments} if manifest.kv_cache_strategy == EXACT else set()
    cache = {names.past(layer, kind) for layer in range(manifest.model.num_layers) for kind in ("key", "value")}
    return {names.INPUT_IDS, names.TOTAL_LENGTH, names.LOGITS_POSITIONS} | routing | pending | cache


def graph_outputs(manifest: Manifest) -> set[str]:
    """Names of the outputs that a graph of this manifest must have."""
    routing = {names.SCORES} if manifest.checkpoints else set()
    if manifest.checkpoints and manifest.kv_cache_strategy == EXACT:
        routing.add(names.NEW_PENDING)
    cache = {names.present(layer, kind) for layer in range(manifest.model.num_layers) for kind in ("key", "value")}
    return {names.LOGITS} | routing | cache
