"""How tokens are made out of steps, apart from who runs the steps.

A `Decoder` holds what one sequence needs to choose its tokens. Its `block` is a generator that asks for steps and, once
it has them, returns the next tokens. `TokenStream` runs each step on a sequence of its own (`run_block`), a batch asks
all its decoders and runs one step over all of their sequences (`batch.generate`); the decoders are the same.
`OneByOne` makes a token of every step, `lossless.LosslessDecoder` drafts and verifies.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from tide_export.runtime.decoding.sampling import Sampler


class Token(NamedTuple):
    """One token that is handed out."""

    id: int
    exit_layer: int  # layers it was made after (a confirmed draft: drafted after), 0 if looked up
    layers_run: int  # layer passes it cost; those of rejected drafts are counted at the token that replaced them


class StepRequest(NamedTuple):
    """A step that a decoder asks for: the arguments of `State.step`."""

    ids: Sequence[int] | np.ndarray
    logits_to_keep: int = 1
    full: bool = False


class StepAnswer(Protocol):
    """What it reads of the result: see `state.StepResult`."""

    @property
    def logits(self) -> np.ndarray: ...

    @property
    def rows(self) -> np.ndarray: ...

    @property
    def exit_layer(self) -> int: ...

    @property
    def segments_run(self) -> int: ...


Block = Generator[StepRequest, StepAnswer, list[Token]]


class Decoder(ABC):
    """Chooses the tokens of one sequence.

    Attributes:
        drafted, accepted: drafts made and drafts that stood, so far.
        lookup_drafted, lookup_accepted: those of them that came from the text.
        undone: positions that were computed by every layer and then forgotten.
        verifies: whether a step that comes to the last segment must give the logits of full depth, also where the token
            could have left before and only came along with others.
    """

    verifies = False
    drafted = accepted = lookup_drafted = lookup_accepted = undone = 0

    @abstractmethod
    def block(self, ids: np.ndarray | list[int], most: int) -> Block:
        """Asks for steps and returns the next 1 to `most` tokens behind `ids`, which the sequence has not seen: the
        prompt, or the last token given."""


class OneByOne(Decoder):
    """Every step gives a token."""

    def __init__(self, sampler: Sampler, depths: Sequence[int]) -> None:
        """`depths`: layers up to the end of each segment."""
        self._sampler, self._depths = sampler, depths

    def block(self, ids: np.ndarray | list[int], most: int) -> Block:
        result = yield StepRequest(ids)
        return [Token(self._sampler(result.logits), result.exit_layer, self._depths[result.segments_run - 1])]


def run_block(block: Block, step: Callable[..., StepAnswer]) -> list[Token]:
    """The tokens of `block`, whose steps `step` runs one after the other."""
    try:
        request = next(block)
        while True:
            request = block.send(step(*request))
    except StopIteration as end:
        tokens: list[Token] = end.value
        return tokens
