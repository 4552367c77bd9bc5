"""One request in a scheduler: what it asks for next, and how far it has come."""

import time
from collections.abc import Callable, Sequence

import numpy as np

from tide_export.runtime.decoding.decoder import Decoder, StepRequest
from tide_export.runtime.decoding.generation import Progress
from tide_export.runtime.request import Request
from tide_export.runtime.sequence import SequenceState, StepResult

MakeDecoder = Callable[[SequenceState], Decoder]


class Job:
    """A request from its submission to its end.

    Attributes:
        progress: its tokens and statistics so far.
        slot: None while it waits, and after its end.
        cancelled: whether it shall end before the next step.
        arrived: when it was submitted, `time.monotonic`.
    """

    def __init__(
        self,
        prompt: np.ndarray,
        request: Request,
        progress: Progress,
        make_decoder: MakeDecoder,
        deadline: float | None = None,
    ) -> None:
        """`deadline`: by `time.monotonic`, when it is cancelled."""
        self.prompt, self.request, self.progress = prompt, request, progress
        self.slot: int | None = None
        self.cancelled = False
        self.arrived = time.monotonic()
        self._make_decoder, self._deadline = make_decoder, deadline

    @property
    def reserved(self) -> int:
        """Tokens of K/V that it may need."""
        return len(self.prompt) + self.request.config.max_new_tokens

    def expired(self, now: float) -> bool:
        return self._deadline is not None and now >= self._deadline

    def begin(self, slot: int, state: SequenceState) -> None:
        """Takes over the empty sequence in a slot."""
        self.slot, self._state, self._decoder = slot, state, self._make_decoder(state)
        self._next_block()

    def end(self) -> None:
        """Frees what it has in its slot, the K/V buffers among it: a caller may keep the handle for long."""
        self.slot = None
        del self._state, self._decoder, self._block, self._step

    def skip(self, count: int) -> None:
        """Omits the first `count` tokens of the prompt, whose K/V are in the slot, from the first step."""
        self._stepped = self.progress.cached_tokens = count

    @property
    def unread(self) -> bool:
        """Whether its slot is empty yet."""
        return not self._state.length

    @property
    def reads_prompt(self) -> bool:
        return not self.progress.tokens

    @property
    def verifies(self) -> bool:
        return self._decoder.verifies

    def next_step(self, limit: int, whole: bool) -> StepRequest | None:
        """The next step, over at most `limit` tokens where it is a prompt's; None: `limit` leaves nothing.

        Args:
            whole: of several tokens one must not be left for a step of its own: where K/V are propagated such a step
                could exit.
        """
        ids, keep, full = self._step
        rest = len(ids) - self._stepped
        count = rest
        if self.reads_prompt and rest > limit:
            count = limit - (whole and rest - limit == 1)
            if count < 1 + (whole and rest > 1):
                return None
        self._count = count
        return StepRequest(ids[self._stepped : self._stepped + count], keep, full)

    def take(self, result: StepResult, seconds: float) -> list[int]:
        """Goes on with the result of the step of `next_step`, which took `seconds`; the new tokens."""
        self._seconds += seconds
        self._stepped += self._count
        if self._stepped < len(self._step.ids):
            return []
        try:
            self._request_step(self._block.send(result))
        except StopIteration as end:
            progress = self.progress
            tokens = progress.take(end.value, self._decoder, self._state.computed, self._seconds)
            if progress.finish_reason is None:
                self._next_block()
            return tokens
        return []

    def _next_block(self) -> None:
        self._block, self._seconds = self.progress.block(self._decoder), 0.0
        self._request_step(next(self._block))

    def _request_step(self, step: StepRequest) -> None:
        self._step, self._stepped = step, 0


def in_order(jobs: Sequence[Job]) -> list[Job]:
    """Those that write first, then those that read their prompt, each as they came."""
    return sorted(jobs, key=lambda job: (not job.progress.tokens, job.arrived))
