"""Lossless mode: what leaves early is only a draft, and the deep segments' one run over all that waits verifies it.

`LosslessDecoder.block` gives the next tokens; all of them are the full model's own. A draft costs the shallow segments
and the head; when the router is not sure, or enough drafts wait, the last segment runs over the waiting tokens and
gives the full-depth logits of every one. Greedy: the longest prefix of drafts that equals the full
model's choices stands. Sampling: speculative rejection (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023,
arXiv 2302.01318), so that each token is distributed as the full model's. What is rejected is undone by lowering the
lengths of the K/V buffers: nothing is copied. Self-speculative decoding with early exits is LayerSkip's idea (Elhoushi
et al. 2024, arXiv 2404.16710); here the verifying run is the catch-up that lazy depth does anyway, so no layer runs
twice for a token. Where the text has been here before (`lookup`), what followed then is drafted without any step, and
verified by the same run.
"""

from collections.abc import Container, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from tide_export.runtime.decoding.decoder import Block, Decoder, StepRequest, Token
from tide_export.runtime.decoding.prompt_lookup import PromptLookup
from tide_export.runtime.decoding.sampling import Sampler


class DraftLimits(NamedTuple):
    """How far a decoder may draft; the defaults are for bundles that do not say."""

    max_drafts: int = 6  # early exits that may wait for one verification; 0 never drafts by exits
    prompt_lookup: int = 8  # tokens of one guess from the text; 0 never looks up
    min_match: int = 2  # tokens that must have stood there before


class Rewindable(Protocol):
    """What a decoder needs of its sequence besides steps: a `State`, or a row of a batch."""

    @property
    def length(self) -> int: ...

    def rewind(self, length: int) -> None: ...


class Draft(NamedTuple):
    """A token that waits for its verification."""

    id: int
    exit_layer: int
    layers_run: int
    choices: tuple[np.ndarray, np.ndarray] | None  # ids [n] and probabilities [n] it was drawn from; None: greedy


class LosslessDecoder(Decoder):
    """Drafts and verifies one sequence."""

    verifies = True

    def __init__(
        self,
        state: Rewindable,
        sampler: Sampler,
        depths: Sequence[int],
        limits: DraftLimits,
        stop: Container[int],
        context: int | None,
    ) -> None:
        """Takes over a sequence that is empty and takes no steps but those that `block` asks for.

        Nothing but `full` may force a token through the last segment. Where it comes along with other sequences'
        tokens it is verified there and then: greedy tokens are the same, but drawn ones others.

        Args:
            depths: layers up to the end of each segment.
            stop: token ids that end a generation: nothing is drafted behind one.
            context: tokens the sequence may have, None without a limit.
        """
        self._state = state
        self._sampler = sampler
        self._depths = depths
        self._max_drafts = limits.max_drafts
        self._lookup = PromptLookup(limits.prompt_lookup, limits.min_match)
        self._stop = stop
        self._context = context

    def block(self, ids: np.ndarray | list[int], most: int) -> Block:
        state, drafts = self._state, list[Draft]()
        if not state.length:
            self._lookup.extend(np.asarray(ids).tolist())
            most = 1  # a prompt is not worth a draft: it needs every layer
        limit = min(self._max_drafts, most - 1)
        while True:
            length = state.length + len(ids)
            ends = bool(drafts) and drafts[-1].id in self._stop
            guess = [] if ends else self._guess(drafts, most - 1 - len(drafts), length)
            last_place = self._context is not None and length == self._context
            verify = bool(guess) or len(drafts) >= limit or last_place or ends
            kept = len(drafts) + len(guess) + 1
            result = yield StepRequest([*ids, *guess] if guess else ids, kept, verify)
            passes = self._depths[result.segments_run - 1]
            if result.segments_run == len(self._depths):
                break
            drafts.append(Draft(*self._draw(result.logits, result.exit_layer, passes)))
            ids = [drafts[-1].id]
        early = len(drafts)
        drafts += [self._looked_up(token) for token in guess]
        stood, token = self._verify(drafts, result.rows)
        if guess and stood >= early:
            self._lookup.learn(len(guess), stood - early)
        self.drafted += len(drafts)
        self.accepted += stood
        self.lookup_drafted += len(guess)
        self.lookup_accepted += max(stood - early, 0)
        self.undone += len(drafts) - stood
        state.rewind(state.length - (len(drafts) - stood))
        in_vain = sum(draft.layers_run for draft in drafts[stood:])
        block = [
            *(Token(draft.id, draft.exit_layer, draft.layers_run) for draft in drafts[:stood]),
            Token(token, result.exit_layer, passes + in_vain),
        ]
        self._lookup.extend([token.id for token in block])
        return block

    def _guess(self, drafts: list[Draft], most: int, length: int) -> list[int]:
        """What may follow a sequence of `length` tokens that ends in `drafts`, with nothing behind a stop token."""
        if self._context is not None:
            most = min(most, self._context - length)
        guess = self._lookup.guess([draft.id for draft in drafts], most)
        for number, token in enumerate(guess):
            if token in self._stop:
                return guess[: number + 1]
        return guess

    def _looked_up(self, token: int) -> Draft:
        """A draft that was not drawn: as if from a distribution of this token alone."""
        choices = None if self._sampler.greedy else (np.array([token]), np.ones(1))
        return Draft(token, 0, 0, choices)

    def _draw(self, logits: np.ndarray, exit_layer: int, layers_run: int) -> Draft:
        if self._sampler.greedy:
            return Draft(self._sampler(logits), exit_layer, layers_run, None)
        choices = self._sampler.distribution(logits)
        return Draft(self._sampler.draw(*choices), exit_layer, layers_run, choices)

    def _verify(self, drafts: list[Draft], rows: np.ndarray) -> tuple[int, int]:
        """How many drafts stand and the full model's token behind them, from its logits [len(drafts) + 1, V]."""
        for number, draft in enumerate(drafts):
            token = self._replacement(draft, rows[number])
            if token is not None:
                return number, token
        return len(drafts), self._sampler(rows[-1])

    def _replacement(self, draft: Draft, logits: np.ndarray) -> int | None:
        """The full model's token where the draft falls, None where it stands.

        Rejection: with p the full model's probabilities and q those the draft was drawn from, it stands with
        probability min(1, p / q); else the token is drawn from max(p - q, 0), normalised.
        """
        if draft.choices is None:
            token = self._sampler(logits)
            return None if token == draft.id else token
        wanted = _dense(self._sampler.distribution(logits), len(logits))
        given = _dense(draft.choices, len(logits))
        if self._sampler.uniform() * given[draft.id] < wanted[draft.id]:
            return None
        left = np.maximum(wanted - given, 0.0)
        (ids,) = left.nonzero()
        return self._sampler.draw(ids, left[ids])


def _dense(choices: tuple[np.ndarray, np.ndarray], vocabulary: int) -> np.ndarray:
    """Probabilities of all tokens, float64 [V]."""
    ids, probabilities = choices
    dense = np.zeros(vocabulary)
    dense[ids] = probabilities
    return dense
