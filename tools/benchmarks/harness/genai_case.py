"""Cases of ONNX Runtime GenAI's graph, run in ONNX Runtime with K/V shared in place as GenAI does on the CPU.

Only the run of the graph is timed, without GenAI's own code.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime

from harness.interleave import Case
from harness.spinning import SPIN_MICROSECONDS

CHUNK = 512  # tokens a context is read in: attention over thousands at once takes gigabytes


class GenaiGraph:
    """A session of the builder's graph."""

    def __init__(self, folder: Path, threads: int, spin: int = SPIN_MICROSECONDS) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(spin))
        self.session = onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
        decoder = json.loads((folder / "genai_config.json").read_text())["model"]["decoder"]
        self.kv_shape = (decoder["num_key_value_heads"], decoder["head_size"])
        self.vocab_size = self.session.get_outputs()[0].shape[-1]


class GenaiSequence:
    """One sequence with room for `capacity` tokens."""

    def __init__(self, graph: GenaiGraph, capacity: int) -> None:
        self._session, self._binding = graph.session, graph.session.io_binding()
        self.length = 0
        heads, head_size = graph.kv_shape
        self._kept: list = []  # the binding holds bare pointers
        for value in self._session.get_inputs():
            if value.name.startswith("past_key_values"):
                array = np.zeros((1, heads, capacity, head_size), np.float32)
                shared = onnxruntime.OrtValue.ortvalue_from_numpy(array)
                self._binding.bind_ortvalue_input(value.name, shared)
                self._binding.bind_ortvalue_output(value.name.replace("past_key_values", "present"), shared)
                self._kept += [array, shared]
        self._logits = np.zeros((1, 1, graph.vocab_size), np.float32)
        self._shared_logits = onnxruntime.OrtValue.ortvalue_from_numpy(self._logits)

    def run(self, ids: Sequence[int]) -> float:
        """Seconds of the graph's run over `ids`, after what the sequence holds."""
        self.length += len(ids)
        self._binding.bind_cpu_input("input_ids", np.array([ids], np.int64))
        self._binding.bind_cpu_input("attention_mask", np.ones((1, self.length), np.int64))
        if len(ids) == 1:
            self._binding.bind_ortvalue_output("logits", self._shared_logits)
        else:
            self._binding.bind_output("logits")  # a row per token, or one: as the graph was built
        started = time.perf_counter()
        self._session.run_with_iobinding(self._binding)
        return time.perf_counter() - started

    def read(self, ids: Sequence[int]) -> None:
        for start in range(0, len(ids), CHUNK):
            self.run(ids[start : start + CHUNK])

    def logits(self) -> np.ndarray:
        """Float32 [V] of the last run, which was over one token."""
        return self._logits[0, 0]

    def rewind(self, length: int) -> None:
        self.length = length


def decode_case(graph: GenaiGraph, context: Sequence[int], room: int) -> Case:
    """One decode step after `context` and at most `room` tokens more."""
    sequence = GenaiSequence(graph, len(context) + 2 * room)
    sequence.read(context)

    def case() -> float:
        if sequence.length > len(context) + room:
            sequence.rewind(len(context))
        return sequence.run([context[-1]])

    return case


def prefill_case(graph: GenaiGraph, prompt: Sequence[int], room: int) -> Case:
    """A new sequence up to its first logits, memory for K/V included."""

    def case() -> float:
        started = time.perf_counter()
        GenaiSequence(graph, len(prompt) + room).run(prompt)
        return time.perf_counter() - started

    return case
