"""How tokens are made out of steps, apart from what runs the steps.

A `Decoder` holds what one sequence needs to choose its tokens. Its `block` is a generator that requests steps and
returns the next tokens. `TokenStream` runs each step on one sequence (`run_block`); `generate_batch` collects the
requests of all its decoders and runs one step over all of their sequences. `OneByOne` makes a token of every step,
`lossless.LosslessDecoder` drafts and verifies.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tide_export.runtime.decoding.sampling import Sampler, TokenLogprobs
from tide_export.runtime.sequence import StepResult


class Token(NamedTuple):
    """One token that is returned."""

    id: int
    exit_layer: int  # layers it was made after (an accepted draft: drafted after); 0: a prompt-lookup draft
    layers_run: int  # layer passes it cost; those of rejected drafts are counted at the token that replaced them


class StepRequest(NamedTuple):
    """A step that a decoder requests: the arguments of `SingleSequence.step`."""

    ids: Sequence[int] | np.ndarray
    logits_to_keep: int = 1
    full: bool = False


Block = Generator[StepRequest, StepResult, list[Token]]


class Decoder(ABC):
    """Chooses the tokens of one sequence.

    Attributes:
        drafted, accepted: drafts made and accepted so far.
        lookup_drafted, lookup_accepted: those of them that are prompt-lookup drafts.
        undone: positions that every layer computed and that were then rewound.
        verifies: whether a step that reaches the last segment must give the logits of full depth, also where the token
            could have exited before and only caught up with others.
    """

    _sampler: Sampler
    verifies = False
    drafted = accepted = lookup_drafted = lookup_accepted = undone = 0

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """Of all tokens chosen so far; None: they were not asked for."""
        return self._sampler.logprobs

    @abstractmethod
    def save(self) -> Any:
        """What `restore` needs to undo the blocks after this call."""

    @abstractmethod
    def restore(self, saved: Any) -> None:
        """Undoes all blocks since `saved`, also one that an exception ended at any point."""

    @abstractmethod
    def block(self, ids: np.ndarray | list[int], max_tokens: int) -> Block:
        """Requests steps and returns the next 1 to `max_tokens` tokens after `ids`, which the sequence has not seen:
        the prompt, or the last token returned."""


class OneByOne(Decoder):
    """Every step gives a token."""

    def __init__(self, sampler: Sampler, depths: Sequence[int]) -> None:
        """`depths`: layers up to the end of each segment."""
        self._sampler, self._depths = sampler, depths

    def save(self) -> Any:
        return self._sampler.save()

    def restore(self, saved: Any) -> None:
        self._sampler.restore(saved)

    def block(self, ids: np.ndarray | list[int], max_tokens: int) -> Block:
        result = yield StepRequest(ids)
        return [Token(self._sampler(result.choice), result.exit_layer, self._depths[result.segments_run - 1])]


def run_block(block: Block, step: Callable[..., StepResult]) -> list[Token]:
    """The tokens of `block`, whose steps `step` runs one after the other."""
    try:
        request = next(block)
        while True:
            request = block.send(step(*request))
    except StopIteration as end:
        tokens: list[Token] = end.value
        return tokens
