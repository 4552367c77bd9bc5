"""Runs a bundle's model.onnx, the graph that skips layers by itself, in ONNX Runtime alone.

None of the library's operators is there: the functions that the graph holds compute what they do. So what `validate`
finds equal here is equal in any runtime of ONNX that has the operators these functions use.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from tide_export.bundle.file_names import GRAPH_FILE
from tide_export.bundle.opened import Bundle
from tide_export.errors import BundleError, GenerationError, first_line
from tide_export.names import paged
from tide_export.names import step_graph as names
from tide_export.runtime.stepping import NO_LIMIT, StepResult
from tide_export.thresholds.resolve import NEVER_EXIT

PAGE_TOKENS = 16
SCORED = 1.0  # a threshold that no score is above
Arrays = dict[str, np.ndarray]


class StepGraph:
    """A bundle's model.onnx as a session, for any number of sequences, one at a time."""

    def __init__(self, bundle: Bundle, threads: int | None = None) -> None:
        """Opens the graph.

        Args:
            threads: of a step; None: one per physical core.

        Raises:
            BundleError: ONNX Runtime cannot load it.
        """
        self.manifest = bundle.manifest
        options = ort.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads = 4, threads or 0
        # Neither weights in float32 that a function makes of them, nor packed ones: memory of a large model.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(bundle.path))
        # By default it would round the inputs of dequantized matrices to 8 bits.
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        file = bundle.file(GRAPH_FILE)
        try:
            self.session = ort.InferenceSession(file.read_bytes(), options)
        except Exception as error:  # of classes that differ between releases
            raise BundleError(f"ONNX Runtime cannot load '{file.path}': {first_line(error)}") from None
        self.outputs = [output.name for output in self.session.get_outputs()]

    def start(self, thresholds: Sequence[float], max_pending: int) -> "GraphSequence":
        """Creates an empty sequence to `step`; the arguments are those of `Engine.start`."""
        return GraphSequence(self, thresholds, max_pending)


class GraphSequence:
    """Steps one sequence through the graph.

    Attributes:
        thresholds: one per checkpoint; may be changed.
        outputs: of the last step, by name.
    """

    def __init__(self, graph: StepGraph, thresholds: Sequence[float], max_pending: int) -> None:
        self.graph, self.thresholds, self.max_pending = graph, list(thresholds), max_pending
        manifest = graph.manifest
        self.lengths = [0] * len(manifest.segment_sizes)
        self.outputs: Arrays = {}
        self._none = np.zeros((1, 0, manifest.model.hidden_size), np.float32)
        self._pending = [self._none for _ in manifest.checkpoints]
        self._memory = self._empty_memory()

    def step(self, ids: Sequence[int], logits_to_keep: int = 1, full: bool = False) -> StepResult:
        """Runs S new tokens; arguments and result are those of `SingleSequence.step`.

        Raises:
            GenerationError: ONNX Runtime failed.
        """
        total = self.lengths[0] + len(ids)
        self._make_room(total)
        limits = [NEVER_EXIT] * len(self.thresholds) if full else self.thresholds
        forced = [total - length > self.max_pending for length in self.lengths[1:]]
        skips = [max(limit, SCORED) if must else limit for limit, must in zip(limits, forced, strict=True)]
        keep = min(logits_to_keep, total - self.lengths[-1])
        feeds: Arrays = {
            names.INPUT_IDS: np.array([ids]),
            names.SEQUENCE_LENGTHS: np.array([total]),
            names.PAGE_TABLE: np.arange(-(-total // PAGE_TOKENS), dtype=np.int32)[None],
            names.LOGITS_POSITIONS: np.array([[0, n - keep] for n in range(keep)]),
            names.THRESHOLDS: np.array(limits, np.float32),
        }
        for k, (skip, pending) in enumerate(zip(skips, self._pending, strict=True), start=1):
            feeds[names.skip_threshold(k)], feeds[names.pending(k)] = np.array([skip], np.float32), pending
        self._run(feeds | self._memory)
        scores = self.outputs[names.SCORES][0] if limits else np.zeros(0, np.float32)
        segments_run, exits = 1 + _first_above(scores, skips), _first_above(scores, limits)
        self._end(segments_run, total)
        depths = [*self.graph.manifest.checkpoints, self.graph.manifest.model.num_layers]
        rows = self.outputs[names.LOGITS]
        return StepResult(rows[-1], rows, depths[exits], segments_run, scores)

    def _run(self, feeds: Arrays) -> None:
        wanted = {entry.name for entry in self.graph.session.get_inputs()}
        given: Any = {name: array for name, array in feeds.items() if name in wanted}
        try:
            results = self.graph.session.run(None, given)
        except Exception as error:  # of classes that differ between releases
            raise GenerationError(f"ONNX Runtime failed in {GRAPH_FILE}: {first_line(error)}") from None
        self.outputs = dict(zip(self.graph.outputs, results, strict=True))

    def _end(self, segments_run: int, total: int) -> None:
        """Keeps K/V and recurrent states, and what is pending before the first segment that did not run."""
        self.lengths[:segments_run] = [total] * segments_run
        self._pending[: segments_run - 1] = [self._none] * (segments_run - 1)
        if segments_run < len(self.lengths):
            self._pending[segments_run - 1] = self.outputs[names.NEW_PENDING]
        for name in self._memory:
            self._memory[name] = self.outputs.get(f"new_{name}", self._memory[name])

    def _make_room(self, tokens: int) -> None:
        """Adds pages to the K/V cache, twice as many each time."""
        for layer in self._layers:
            for kind in ("key", "value"):
                pages = self._memory[paged.pages(layer, kind)]
                if tokens > len(pages) * PAGE_TOKENS:
                    more = np.zeros((-(-2 * tokens // PAGE_TOKENS) - len(pages), *pages.shape[1:]), pages.dtype)
                    self._memory[paged.pages(layer, kind)] = np.concatenate([pages, more])

    @property
    def _layers(self) -> list[int]:
        model = self.graph.manifest.model
        return model.kv_read(range(model.num_layers))

    def _empty_memory(self) -> Arrays:
        manifest, memory = self.graph.manifest, Arrays()
        for layer in self._layers:
            heads, width = manifest.kv_shape(layer)
            for kind in ("key", "value"):
                memory[paged.pages(layer, kind)] = np.zeros((0, heads, PAGE_TOKENS, width), manifest.kv_dtype)
        for state in manifest.model.states or ():
            memory[paged.states(state.layer, state.number)] = np.zeros((1, *state.shape), np.float32)
        memory[names.STATE_PLACES] = np.array([[0, NO_LIMIT]])
        if manifest.model.lora is not None:
            memory[paged.LORA_WEIGHTS] = np.zeros((1, manifest.model.lora.size), np.float32)
            memory[paged.ADAPTERS] = np.array([0])
        return memory


def _first_above(scores: Sequence[float] | np.ndarray, limits: Sequence[float]) -> int:
    """Returns the index of the first score above its limit, which NaN is not; their number if none is."""
    above = (k for k, (score, limit) in enumerate(zip(scores, limits, strict=True)) if score > np.float32(limit))
    return next(above, len(limits))
