"""Generation for a list of prompts: sequences join the batch as slots become free and leave it when they end.

Every sequence has its own decoder, random numbers and statistics. A step runs what each decoder requests, whatever the
lengths; it gives a sequence a token, or in lossless mode a draft, or all tokens that a verifying run makes certain.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from tide_export.bundle.manifest import Manifest
from tide_export.runtime.decoding.decoder import Decoder
from tide_export.runtime.decoding.generation import Generation, Progress
from tide_export.runtime.sequence import Batch, SequenceState, StepResult

MAX_STEP_TOKENS = 2048  # new tokens of a step, but for a single longer prompt: bounds memory and latency


class _Sequence:
    """A sequence while it has a slot.

    Attributes:
        request: the step that its decoder requests next.
        verifies: as its decoder.
    """

    def __init__(self, progress: Progress, decoder: Decoder, state: SequenceState) -> None:
        self.progress, self.verifies = progress, decoder.verifies
        self._decoder, self._state = decoder, state
        self._begin()

    def _begin(self) -> None:
        self._block, self._seconds = self.progress.block(self._decoder), 0.0
        self.request = next(self._block)

    def take(self, result: StepResult, seconds: float) -> None:
        """Goes on with the result of a step that took `seconds`."""
        self._seconds += seconds
        try:
            self.request = self._block.send(result)
        except StopIteration as end:
            self.progress.take(end.value, self._decoder, self._state.computed, self._seconds)
            if self.progress.finish_reason is None:
                self._begin()


def generate_batch(
    batch: Batch,
    manifest: Manifest,
    prompts: Sequence[np.ndarray],
    decoders: Sequence[Callable[[SequenceState], Decoder]],
    max_new_tokens: int,
    stop: frozenset[int],
) -> list[Generation]:
    """One generation per prompt (int64 [S], checked), in their order.

    Args:
        batch: an empty one.
        decoders: make the decoder of a new sequence, one per prompt.

    Raises:
        GenerationError: no memory for the K/V cache, the logits are not finite, or ONNX Runtime failed.
    """
    progress = [Progress(manifest, prompt, max_new_tokens, stop) for prompt in prompts]
    queue, running = deque(range(len(prompts))), dict[int, _Sequence]()
    while queue or running:
        load = sum(len(sequence.request.ids) for sequence in running.values())
        while queue and batch.free_slots and (load == 0 or load + len(prompts[queue[0]]) <= MAX_STEP_TOKENS):
            number, slot = queue.popleft(), batch.join()
            load += len(prompts[number])
            state = batch.sequences[slot]
            running[slot] = _Sequence(progress[number], decoders[number](state), state)
        started = time.perf_counter()
        results = batch.step(
            {slot: one.request.ids for slot, one in running.items()},
            logits_to_keep={slot: one.request.logits_to_keep for slot, one in running.items() if one.verifies},
            full={slot for slot, one in running.items() if one.request.full},
        )
        seconds = time.perf_counter() - started
        for slot, result in results.items():
            sequence = running[slot]
            sequence.take(result, seconds)
            if sequence.progress.finish_reason is not None:
                del running[slot]
                batch.leave(slot)
    return [one.finished() for one in progress]
