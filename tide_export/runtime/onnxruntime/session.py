"""From a checked bundle to an ONNX Runtime session: which engine runs it, with which options, and a contract check.

`providers` calls `open_session` once per bundle; every `SequenceState` then runs steps through the one session. ONNX
Runtime is imported here, and only when asked to.
"""

import logging
from types import ModuleType
from typing import Any

from tide_export import names
from tide_export.bundle.manifest import EXACT, Manifest
from tide_export.bundle.store import Bundle
from tide_export.errors import BundleError, ConfigError, ProviderError
from tide_export.runtime.onnxruntime.huge_pages import on_huge_pages

logger = logging.getLogger("tide_export")

# A worker thread waits so long for the next operator before it sleeps. If it slept at once, waking it would take longer
# than its half of a small product: two threads are then no faster than one. ONNX Runtime's own default is milliseconds,
# which starves whatever else runs on the cores, another engine first of all (tools/benchmarks/threads.py).
SPIN_MICROSECONDS = 20
FATAL = 4  # ONNX Runtime's log level: its errors reach the user as exceptions, not a second time on stderr


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
    options = session_options(ort, threads)
    graph = bundle.file(names.GRAPH_FILE)
    try:
        with on_huge_pages():
            session = ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's exceptions share no base class of their own
        raise BundleError(f"ONNX Runtime cannot load '{graph}': {first_line(error)}") from error
    check_contract(session, graph_inputs(bundle.manifest), graph_outputs(bundle.manifest), str(graph))
    logger.info(
        "running '%s' with ONNX Runtime %s on the CPU, %s threads", bundle.path, ort.__version__, threads or "default"
    )
    return session


def check_threads(threads: int | None) -> None:
    """Raises ConfigError for a number of threads below 1."""
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        raise ConfigError(f"threads must be a whole number, 1 or more, not {threads!r}")


def session_options(ort: ModuleType, threads: int | None) -> Any:
    """The options every session here is opened with.

    Raises:
        ConfigError: threads below 1.
    """
    check_threads(threads)
    options = ort.SessionOptions()
    options.log_severity_level = FATAL
    options.intra_op_num_threads = threads or 0
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_MICROSECONDS))
    return options


def import_onnxruntime() -> ModuleType:
    """The onnxruntime module.

    Raises:
        ProviderError: it is not installed.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise ProviderError(f"ONNX Runtime cannot be imported ({error}): pip install tide_export[cpu]") from None
    return onnxruntime


def graph_inputs(manifest: Manifest) -> set[str]:
    """Names of the inputs that a graph of this manifest must have."""
    doors = range(1, len(manifest.checkpoints) + 1) if manifest.kv_cache_strategy == EXACT else ()
    routing = {names.THRESHOLDS} if manifest.checkpoints else set()
    routing |= {names.skip_threshold(k + 1) for k in range(len(manifest.checkpoints))}
    waiting = {names.pending(k) for k in doors}
    cache = {names.past(layer, kind) for layer in range(manifest.model.num_layers) for kind in ("key", "value")}
    return {names.INPUT_IDS, names.TOTAL_LENGTH, names.LOGITS_POSITIONS} | routing | waiting | cache


def graph_outputs(manifest: Manifest) -> set[str]:
    """Names of the outputs that a graph of this manifest must have."""
    routing = {names.SCORES} if manifest.checkpoints else set()
    if manifest.checkpoints and manifest.kv_cache_strategy == EXACT:
        routing.add(names.NEW_PENDING)
    cache = {names.present(layer, kind) for layer in range(manifest.model.num_layers) for kind in ("key", "value")}
    return {names.LOGITS} | routing | cache


def check_contract(session: Any, inputs: set[str], outputs: set[str], graph: str) -> None:
    """Buffers are bound by name and raw shape: a graph that is not the manifest's must not get that far.

    Raises:
        BundleError: naming a tensor that `graph`, a file, lacks or has too many.
    """
    for kind, expected, found in (
        ("input", inputs, {entry.name for entry in session.get_inputs()}),
        ("output", outputs, {entry.name for entry in session.get_outputs()}),
    ):
        for name in sorted(expected - found):
            raise BundleError(f"'{graph}' has no {kind} {name}, which its manifest calls for")
        for name in sorted(found - expected):
            raise BundleError(f"'{graph}' has the {kind} {name}, which its manifest does not know")


def first_line(error: Exception) -> str:
    """What ONNX Runtime says, without the stack it may append."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
