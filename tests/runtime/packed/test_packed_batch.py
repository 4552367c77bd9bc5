"""What lists of prompts rest on: K/V buffers that grow, thresholds as the graph compares them."""

import numpy as np
import pytest

from tide_export.errors import GenerationError
from tide_export.runtime.engine import Engine
from tide_export.runtime.onnxruntime.bindings import import_onnxruntime
from tide_export.runtime.onnxruntime.kv_buffers import KvBuffers
from tide_export.runtime.packed.batch import PackedBatch
from tide_export.runtime.sequence import NO_LIMIT
from tide_export.thresholds.resolve import NEVER_EXIT

IDS = [5, 6, 7]


@pytest.fixture(scope="module")
def engine(tiny_llama) -> Engine:
    return tiny_llama.graph(tiny_llama.exact)


def test_buffers_grow_by_doubling_and_stop_at_the_context(engine: Engine) -> None:
    segments = len(engine.manifest.segment_sizes)
    assert engine.manifest.model.context_length == 256
    buffers = KvBuffers(import_onnxruntime(), engine.manifest, 4)
    for length, new, capacity in [(0, 3, 7), (7, 1, 14), (13, 100, 113), (113, 1, 226), (226, 1, 256)]:
        buffers.reserve(new, [length] * segments)
        assert buffers.capacity == capacity
        buffers.reserve(1, [capacity - 1] * segments)
        assert buffers.capacity == capacity
    with pytest.raises(GenerationError, match="would have 257 tokens but the model's context holds 256"):
        buffers.reserve(2, [255] * segments)


def test_a_threshold_that_float32_rounds_to_the_score_lets_nothing_exit(engine: Engine) -> None:
    """As on the graph of one sequence."""
    never = [NEVER_EXIT] * len(engine.manifest.checkpoints)
    sessions = engine.backend.batch_networks.sessions(2)
    batch = PackedBatch(sessions, engine.manifest, 1.0)
    batch.step({batch.join([1.0, *never[1:]], NO_LIMIT): np.array(IDS, np.int32)})
    score = batch._segments[0].scores[0]
    for threshold, segments_run in [
        (np.nextafter(np.float64(score), 0), len(never) + 1),
        (np.nextafter(score, np.float32(0)), 1),
    ]:
        batch = PackedBatch(sessions, engine.manifest, 1.0)
        slot = batch.join([float(threshold), *never[1:]], NO_LIMIT)
        assert batch.step({slot: IDS})[slot].segments_run == segments_run
