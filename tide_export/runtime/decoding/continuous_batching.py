"""Generation for a list of prompts: sequences join the batch as places fall free and leave it when they end.

`Engine.generate` comes here with a checked request. Every sequence has its own decoder, with its own random numbers,
and its own statistics. A step runs what each decoder asks for, whatever the lengths; it gives a sequence a token, or in
lossless mode a draft, or all that a verifying run makes certain.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from tide_export.bundle.manifest import PROPAGATE, Manifest
from tide_export.runtime.decoding.decoder import Decoder
from tide_export.runtime.decoding.depth_rule import AnyBatch, BatchRow, RowResult
from tide_export.runtime.decoding.generation import Generation, Progress
from tide_export.runtime.decoding.lossless import Rewindable
from tide_export.runtime.packed.batch import Batch
from tide_export.runtime.packed.networks import BatchSessions
from tide_export.runtime.packed.propagate import PropagatingBatch

PROMPT_TOKENS = 2048  # new tokens a step takes at most, but for a single longer prompt: bounds memory and waiting


def empty_batch(
    sessions: BatchSessions,
    manifest: Manifest,
    thresholds: Sequence[float],
    max_pending: int,
    compaction_threshold: float,
) -> Batch:
    """A batch of the bundle's kind of K/V cache; see `Batch`. Where K/V are propagated nothing waits, so the last two
    say nothing."""
    if manifest.kv_cache_strategy == PROPAGATE:
        return PropagatingBatch(sessions, manifest, thresholds)
    return Batch(sessions, manifest, thresholds, max_pending, compaction_threshold)


class _Sequence:
    """One of them while it has a place.

    Attributes:
        request: the step it asks for next.
        verifies: as its decoder.
    """

    def __init__(self, progress: Progress, decoder: Decoder, row: BatchRow) -> None:
        self.progress, self.verifies = progress, decoder.verifies
        self._decoder, self._row = decoder, row
        self._begin()

    def _begin(self) -> None:
        self._block, self._seconds = self.progress.block(self._decoder), 0.0
        self.request = next(self._block)

    def take(self, result: RowResult, seconds: float) -> None:
        """Goes on with the result of a step that took `seconds`."""
        self._seconds += seconds
        try:
            self.request = self._block.send(result)
        except StopIteration as end:
            self.progress.take(end.value, self._decoder, self._row.computed, self._seconds)
            if self.progress.ending is None:
                self._begin()


def generate_batch(
    batch: AnyBatch,
    manifest: Manifest,
    prompts: Sequence[np.ndarray],
    decoders: Sequence[Callable[[Rewindable], Decoder]],
    max_new_tokens: int,
    stop: frozenset[int],
) -> list[Generation]:
    """One generation per prompt (int64 [S], checked), in their order.

    Args:
        batch: an empty one; holds as many sequences at once as it has places.
        decoders: make the decoder of a new sequence, one per prompt.

    Raises:
        GenerationError: no memory for the K/V cache, the logits are not finite, or ONNX Runtime failed.
    """
    progress = [Progress(manifest, prompt, max_new_tokens, stop) for prompt in prompts]
    queue, running = deque(range(len(prompts))), dict[int, _Sequence]()
    while queue or running:
        load = sum(len(sequence.request.ids) for sequence in running.values())
        while queue and batch.free and (load == 0 or load + len(prompts[queue[0]]) <= PROMPT_TOKENS):
            number, place = queue.popleft(), batch.join()
            load += len(prompts[number])
            row = batch.rows[place]
            running[place] = _Sequence(progress[number], decoders[number](row), row)
        started = time.perf_counter()
        results = batch.step(
            {place: one.request.ids for place, one in running.items()},
            logits_to_keep={place: one.request.logits_to_keep for place, one in running.items() if one.verifies},
            full={place for place, one in running.items() if one.request.full},
        )
        seconds = time.perf_counter() - started
        for place, result in results.items():
            sequence = running[place]
            sequence.take(result, seconds)
            if sequence.progress.ending is not None:
                del running[place]
                batch.leave(place)
    return [one.finished() for one in progress]
