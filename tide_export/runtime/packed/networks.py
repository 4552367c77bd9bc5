"""The networks of a batch as ONNX Runtime sessions, opened when the first batch starts.

They hold another copy of the weights in memory (ONNX Runtime packs weights for each session), so only one size of
batch stays open: a larger one replaces a smaller one and serves smaller batches from then on.
"""

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tide_export import names
from tide_export.bundle.manifest import PROPAGATE, Manifest
from tide_export.bundle.opened import Bundle
from tide_export.errors import GenerationError
from tide_export.runtime.onnxruntime.bindings import (
    check_tensors,
    import_onnxruntime,
    load_session,
    tensors_of,
)
from tide_export.runtime.segmented.network_spec import TOKENS, NetworkSpec, Tensor

logger = logging.getLogger("tide_export")

MAX_BATCH_SIZE = names.BATCH_SIZES[-1]


@dataclass(frozen=True)
class BatchSessions:
    """Sessions for batches of up to `slots` sequences; safe to run from several threads at once.

    Attributes:
        segments: shallowest first.
        head: takes exit states.
        exit_size: width D' of these.
        skipped: by segment, for tokens that skip it; none where the K/V cache is exact or another segment's.
    """

    slots: int
    segments: tuple[Any, ...]
    head: Any
    exit_size: int
    skipped: Mapping[int, Any] = field(default_factory=dict)


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
        self._bundle.check_weights()
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
        head = self._session(names.batch_file(names.HEAD))
        exit_size = _exit_size(tensors_of(head.get_inputs()))
        check_tensors(head, _head_spec(manifest, exit_size), str(self._bundle.path / names.batch_file(names.HEAD)))
        segments = [
            self._session(names.batch_file(names.segment(k), slots), _segment_spec(manifest, k, slots, exit_size))
            for k in range(count)
        ]
        propagates = manifest.kv_cache_strategy == PROPAGATE
        skipped = {
            k: self._session(names.batch_file(names.skipped(k)), _skipped_spec(manifest, k))
            for k in range(1, count)
            if propagates and kv_written(manifest, k)
        }
        logger.info("opened the networks for batches of up to %d sequences", slots)
        return BatchSessions(slots, tuple(segments), head, exit_size, skipped)

    def _session(self, name: str, spec: NetworkSpec | None = None) -> Any:
        session = load_session(import_onnxruntime(), self._bundle, name, self._threads)
        if spec is not None:
            check_tensors(session, spec, str(self._bundle.file(name).path))
        return session


def layers_of(manifest: Manifest, k: int) -> range:
    """The layers of segment k."""
    sizes: Sequence[int] = manifest.segment_sizes
    start = sum(sizes[:k])
    return range(start, start + sizes[k])


def kv_written(manifest: Manifest, k: int) -> list[int]:
    """The layers of segment k with K/V of their own, ascending."""
    layers = layers_of(manifest, k)
    return [layer for layer in manifest.model.kv_read(layers) if layer in layers]


def _segment_spec(manifest: Manifest, k: int, slots: int, exit_size: int) -> NetworkSpec:
    """The tensors of segment k's network for so many slots."""
    states = Tensor("float32", (1, TOKENS, manifest.model.hidden_size))
    ids = Tensor("int64", (1, TOKENS))
    inputs = {names.INPUT_IDS: ids} if k == 0 else {names.HIDDEN_STATES: states}
    inputs |= {names.POSITION_IDS: ids, names.LAST_TOKENS: Tensor("int64", (TOKENS,))}
    inputs |= {names.SLOT_TOKENS: Tensor("int64", (slots,)), names.SLOT_LENGTHS: Tensor("int32", (slots,))}
    outputs = {names.EXIT_STATES: Tensor("float32", (TOKENS, exit_size))}
    if k < len(manifest.checkpoints):
        inputs[names.SLOT_THRESHOLDS] = Tensor("float32", (TOKENS, 1))
        outputs |= {names.NEW_HIDDEN_STATES: states, names.ROUTER_SCORE: Tensor("float32", (TOKENS, 1))}
    for layer, kind, cache in _caches(manifest, k):
        inputs |= {names.slot(names.past(layer, kind), slot): cache for slot in range(slots)}
        if layer in kv_written(manifest, k):
            outputs |= {names.slot(names.present(layer, kind), slot): cache for slot in range(slots)}
    return NetworkSpec(names.segment(k), inputs, outputs)


def _skipped_spec(manifest: Manifest, k: int) -> NetworkSpec:
    states = Tensor("float32", (1, TOKENS, manifest.model.hidden_size))
    inputs = {names.HIDDEN_STATES: states, names.POSITION_IDS: Tensor("int64", (1, TOKENS))}
    return NetworkSpec(
        names.skipped(k),
        inputs,
        {names.new(layer, kind): new for layer, kind, new in _caches(manifest, k) if layer in kv_written(manifest, k)},
    )


def _head_spec(manifest: Manifest, exit_size: int) -> NetworkSpec:
    logits = Tensor("float32", (1, TOKENS, manifest.model.vocab_size))
    return NetworkSpec(
        names.HEAD, {names.EXIT_STATES: Tensor("float32", (1, TOKENS, exit_size))}, {names.LOGITS: logits}
    )


def _caches(manifest: Manifest, k: int) -> Iterator[tuple[int, str, Tensor]]:
    """Keys and values that segment k reads: layer, kind and tensor, whose tokens are a dimension."""
    for layer in manifest.model.kv_read(layers_of(manifest, k)):
        heads, width = manifest.kv_shape(layer)
        for kind in ("key", "value"):
            yield layer, kind, Tensor(manifest.kv_dtype, (1, heads, TOKENS, width))


def _exit_size(inputs: Mapping[str, Tensor]) -> int:
    """The last dimension of the head's input; 0, which no head has, where it is not a number."""
    states = inputs.get(names.EXIT_STATES)
    size = states.shape[-1] if states is not None and states.shape else 0
    return size if isinstance(size, int) else 0
