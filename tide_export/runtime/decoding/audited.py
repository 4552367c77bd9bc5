"""Mode `exit` with some of its tokens made again at full depth: what `scheduling.audit` counts.

A token that is chosen and exited is made as ever. Then its position is undone and run again through every segment, and
the positions that are pending before it get their deep K/V in the same run, sooner than they would have. So the tokens
that follow are those without an audit. No check waits for a catch-up, which comes sooner after some tokens than after
others, and for the last ones never: every token has the same chance to be checked.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from tide_export.runtime.decoding.decoder import Block, OneByOne, StepRequest, Token
from tide_export.runtime.decoding.sampling import Sampler
from tide_export.runtime.sequence import SequenceState


class Auditor(Protocol):
    """Chooses tokens, and hears of them."""

    raises: int

    def chooses(self) -> bool: ...

    def record(self, exited: bool, different: bool, raises: int) -> None: ...


class AuditedDecoder(OneByOne):
    """Decodes one sequence whose K/V cache is exact."""

    def __init__(self, state: SequenceState, sampler: Sampler, depths: Sequence[int], auditor: Auditor) -> None:
        """Takes over an empty sequence; `depths` as of `OneByOne`."""
        super().__init__(sampler, depths)
        self._state, self._auditor, self._raises = state, auditor, auditor.raises

    def block(self, ids: np.ndarray | list[int], max_tokens: int) -> Block:
        if not self._auditor.chooses():
            return (yield from super().block(ids, max_tokens))
        result = yield StepRequest(ids)
        exit_layer, passes = result.exit_layer, self._depths[result.segments_run - 1]
        logits, expected = result.choice, None
        if exit_layer < self._depths[-1]:
            if isinstance(logits, np.ndarray):
                logits = logits.copy()  # the next step may change it
            self._state.rewind(self._state.length - 1)
            full = yield StepRequest(ids[-1:], full=True)
            passes += self._depths[-1]
            before = self._sampler.save()
            expected = self._sampler(full.choice)
            self._sampler.restore(before)
        token = self._sampler(logits)
        self._auditor.record(expected is not None, expected not in (None, token), self._raises)
        return [Token(token, exit_layer, passes)]
