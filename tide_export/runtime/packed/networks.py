"""The networks of a batch as ONNX Runtime sessions, opened when the first batch starts.

They hold another copy of the weights in memory (ONNX Runtime packs weights for each session), so only one size of
batch stays open: a larger one replaces a smaller one and serves smaller batches from then on.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tide_export import names
from tide_export.bundle.manifest import PROPAGATE, Manifest
from tide_export.bundle.opened import Bundle
from tide_export.errors import GenerationError
from tide_export.runtime.onnxruntime.library import check_contract, import_onnxruntime, load_session, session_options

logger = logging.getLogger("tide_export")

MAX_BATCH_SIZE = names.BATCH_SIZES[-1]


@dataclass(frozen=True)
class BatchSessions:
    """Sessions for batches of up to `slots` sequences; safe to run from several threads at once.

    Attributes:
        segments: shallowest first.
        head: takes exit states.
        exit_size: width D' of these.
        skipped: for tokens that skip segment 1, 2, ..; none where the K/V cache is exact.
    """

    slots: int
    segments: tuple[Any, ...]
    head: Any
    exit_size: int
    skipped: tuple[Any, ...] = ()


class BatchNetworks:
    """Opens the sessions of batches when they are needed. Safe to use from several threads."""

    def __init__(self, bundle: Bundle, threads: int | None) -> None:
        """`threads`: that one run may use; None leaves it to ONNX Runtime."""
        self._bundle, self._threads = bundle, threads
        self._lock = threading.Lock()
        self._opened: BatchSessions | None = None

    @property
    def max_batch_size(self) -> int:
        """Sequences that a batch can have; 1: the bundle holds no networks for batches."""
        return MAX_BATCH_SIZE if names.batch_file(names.HEAD) in self._bundle.manifest.files else 1

    def sessions(self, count: int) -> BatchSessions:
        """Sessions for `count` sequences at once (MAX_BATCH_SIZE at most).

        Raises:
            GenerationError: the bundle holds no networks for batches.
            BundleError: one of them does not load, or is not what the manifest calls for.
        """
        slots = next(size for size in names.BATCH_SIZES if size >= min(count, MAX_BATCH_SIZE))
        with self._lock:
            if self._opened is None or self._opened.slots < slots:
                self._opened = None  # first, so that two sizes are never held
                self._opened = self._open(slots)
            return self._opened

    def _open(self, slots: int) -> BatchSessions:
        manifest = self._bundle.manifest
        count = len(manifest.segment_sizes)
        if self.max_batch_size == 1:
            raise GenerationError(
                f"bundle '{self._bundle.path}' holds no networks for batches (an earlier release made it, or its "
                "export said why): give one prompt at a time"
            )
        segments = [
            self._session(names.batch_file(names.segment(k), slots), *_tensors(manifest, k, slots))
            for k in range(count)
        ]
        head = self._session(names.batch_file(names.HEAD), {names.EXIT_STATES}, {names.LOGITS})
        skipped = [self._skipped(k) for k in range(1, count)] if manifest.kv_cache_strategy == PROPAGATE else []
        logger.info("opened the networks for batches of up to %d sequences", slots)
        return BatchSessions(slots, tuple(segments), head, int(head.get_inputs()[0].shape[-1]), tuple(skipped))

    def _skipped(self, k: int) -> Any:
        layers = layers_of(self._bundle.manifest, k)
        outputs = {names.new(layer, kind) for layer in layers for kind in ("key", "value")}
        return self._session(names.batch_file(names.skipped(k)), {names.HIDDEN_STATES, names.POSITION_IDS}, outputs)

    def _session(self, name: str, inputs: set[str], outputs: set[str]) -> Any:
        ort = import_onnxruntime()
        file = self._bundle.file(name)
        options = session_options(ort, self._threads)
        # By default ONNX Runtime reads external weights from the network's folder only.
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(self._bundle.path))
        session = load_session(ort, file, options)
        check_contract(session, inputs, outputs, str(file))
        return session


def layers_of(manifest: Manifest, k: int) -> range:
    """The layers of segment k."""
    sizes: Sequence[int] = manifest.segment_sizes
    start = sum(sizes[:k])
    return range(start, start + sizes[k])


def _tensors(manifest: Manifest, k: int, slots: int) -> tuple[set[str], set[str]]:
    """Names of the inputs and outputs of segment k's network for so many slots."""
    inputs = {names.INPUT_IDS if k == 0 else names.HIDDEN_STATES}
    inputs |= {names.POSITION_IDS, names.LAST_TOKENS, names.SLOT_TOKENS, names.SLOT_LENGTHS}
    outputs = {names.EXIT_STATES}
    if k < len(manifest.checkpoints):
        outputs |= {names.NEW_HIDDEN_STATES, names.ROUTER_SCORE}
    for layer in layers_of(manifest, k):
        for kind in ("key", "value"):
            inputs |= {names.slot(names.past(layer, kind), slot) for slot in range(slots)}
            outputs |= {names.slot(names.present(layer, kind), slot) for slot in range(slots)}
    return inputs, outputs
