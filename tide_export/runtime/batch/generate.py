"""Generation for a list of prompts: sequences join the batch as places fall free and leave it when they end.

`Engine.generate` comes here with a checked request. Every sequence has its own sampler and statistics; a step gives
each one token, whatever the lengths.
"""

import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from tide_export.bundle import Manifest
from tide_export.manifest import PROPAGATE
from tide_export.runtime.batch.networks import BatchSessions
from tide_export.runtime.batch.propagate import PropagatingBatch
from tide_export.runtime.batch.rule import AnyBatch, RowResult
from tide_export.runtime.batch.step import Batch
from tide_export.runtime.generation import FinishReason, Generation, ending
from tide_export.runtime.sampling import Sampler
from tide_export.runtime.stats import ExitStats

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
    def __init__(
        self, manifest: Manifest, prompt: np.ndarray, sampler: Sampler, most: int, stop: frozenset[int]
    ) -> None:
        self.stats = ExitStats(manifest.checkpoints, manifest.model.num_layers, prompt_tokens=len(prompt))
        self.next_ids: np.ndarray | list[int] = prompt
        self.tokens: list[int] = []
        self.reason: FinishReason | None = None
        self._sizes, self._context = manifest.segment_sizes, manifest.model.context_length
        self._sampler, self._most, self._stop = sampler, most, stop

    def take(self, result: RowResult, computed: Sequence[int], seconds: float) -> None:
        """Draws the next token from a step that took `seconds`, and sees whether it is the last.

        Args:
            computed: tokens that each segment has run over by now.
        """
        stats, token = self.stats, self._sampler(result.logits)
        if stats.total_tokens:
            stats.decode_seconds += seconds
        else:
            stats.prefill_seconds += seconds
        stats.record(result.exit_layer, sum(self._sizes[: result.segments_run]))
        stats.layer_tokens_run = sum(n * size for n, size in zip(computed, self._sizes, strict=True))
        stats.layer_tokens_total = stats.num_layers * computed[0]
        self.tokens.append(token)
        self.next_ids = [token]
        self.reason = ending(token, self._stop, len(self.tokens), self._most)
        if self.reason is None and computed[0] == self._context:
            self.reason = "context"  # the token has no place left to be read from


def generate_batch(
    batch: AnyBatch,
    manifest: Manifest,
    prompts: Sequence[np.ndarray],
    samplers: Sequence[Sampler],
    max_new_tokens: int,
    stop: frozenset[int],
) -> list[Generation]:
    """One generation per prompt (int64 [S], checked), in their order.

    Args:
        batch: an empty one; holds as many sequences at once as it has places.
        samplers: one per prompt.

    Raises:
        GenerationError: no memory for the K/V cache, the logits are not finite, or ONNX Runtime failed.
    """
    sequences = [
        _Sequence(manifest, prompt, sampler, max_new_tokens, stop)
        for prompt, sampler in zip(prompts, samplers, strict=True)
    ]
    queue, running = deque(sequences), dict[int, _Sequence]()
    while queue or running:
        tokens = len(running)
        while queue and batch.free and (tokens == 0 or tokens + len(queue[0].next_ids) <= PROMPT_TOKENS):
            tokens += len(queue[0].next_ids)
            running[batch.join()] = queue.popleft()
        started = time.perf_counter()
        results = batch.step({place: sequence.next_ids for place, sequence in running.items()})
        seconds = time.perf_counter() - started
        for place, result in results.items():
            sequence = running[place]
            sequence.take(result, batch.rows[place].computed, seconds)
            if sequence.reason is not None:
                del running[place]
                batch.leave(place)
    return [_finished(sequence) for sequence in sequences]


def _finished(sequence: _Sequence) -> Generation:
    assert sequence.reason is not None
    return Generation(sequence.tokens, sequence.stats, sequence.reason)
