"""Opens a bundle's branched graph in ONNX Runtime on the CPU and checks its inputs and outputs."""

import logging
from typing import Any

from tide_export import names
from tide_export.bundle.manifest import EXACT, Manifest
from tide_export.bundle.opened import Bundle
from tide_export.errors import BundleError
from tide_export.runtime.onnxruntime.bindings import (
    check_tensors,
    import_onnxruntime,
    load_session,
)
from tide_export.runtime.onnxruntime.huge_pages import on_huge_pages
from tide_export.runtime.segmented.network_spec import TOKENS, NetworkSpec, Tensor

logger = logging.getLogger("tide_export")


def open_session(bundle: Bundle, threads: int | None = None) -> Any:
    """The `onnxruntime.InferenceSession` of a bundle's graph on the CPU; safe to run from several threads at once.

    Args:
        threads: threads one step may use; None leaves it to ONNX Runtime (one per physical core).

    Raises:
        ProviderError: ONNX Runtime is not installed.
        ConfigError: threads not in 1..1024.
        BundleError: the graph does not load, or its inputs and outputs are not those of the manifest.
    """
    ort = import_onnxruntime()
    with on_huge_pages():
        session = load_session(ort, bundle, names.GRAPH_FILE, threads)
    graph = str(bundle.file(names.GRAPH_FILE).path)
    check_tensors(session, graph_spec(bundle.manifest), graph)
    _check_metadata(session, bundle.manifest, graph)
    logger.info(
        "running '%s' with ONNX Runtime %s on the CPU, %s threads", bundle.path, ort.__version__, threads or "default"
    )
    return session


def graph_spec(manifest: Manifest) -> NetworkSpec:
    """The tensors that a graph of this manifest must have."""
    model, count = manifest.model, len(manifest.checkpoints)
    waiting = Tensor("float32", (1, TOKENS, model.hidden_size))
    inputs = {names.INPUT_IDS: Tensor("int64", (1, TOKENS)), names.TOTAL_LENGTH: Tensor("int32", ())}
    inputs[names.LOGITS_POSITIONS] = Tensor("int64", (TOKENS, 2))
    outputs = {names.LOGITS: Tensor("float32", (TOKENS, model.vocab_size))}
    if count:
        inputs[names.THRESHOLDS] = Tensor("float32", (count,))
        outputs[names.SCORES] = Tensor("float32", (1, count))
    for k in range(1, count + 1):
        inputs[names.skip_threshold(k)] = Tensor("float32", (1,))
        if manifest.kv_cache_strategy == EXACT:
            inputs[names.pending(k)] = outputs[names.NEW_PENDING] = waiting
    for layer in model.kv_read(range(model.num_layers)):
        heads, width = manifest.kv_shape(layer)
        for kind in ("key", "value"):
            cache = Tensor(manifest.kv_dtype, (1, heads, TOKENS, width))
            inputs[names.past(layer, kind)] = outputs[names.present(layer, kind)] = cache
    return NetworkSpec(names.GRAPH_FILE, inputs, outputs)


def _check_metadata(session: Any, manifest: Manifest, graph: str) -> None:
    """Compares what the graph was exported with, and its tensors do not show, with the manifest."""
    try:
        present = session.get_modelmeta().custom_metadata_map
    except UnicodeDecodeError:
        present = {}
    for name, expected in manifest.graph_metadata.items():
        field = name.removeprefix("tide.")
        if name not in present:
            raise BundleError(f"'{graph}' does not record its {field}, as this release writes it: export again")
        if present[name] != expected:
            raise BundleError(
                f"'{graph}' was exported with other {field} than its manifest's {expected or 'none'}: "
                "export the bundle again or copy it anew"
            )
