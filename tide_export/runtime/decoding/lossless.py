"""Lossless mode: tokens that exit early are drafts, and the deep segments' run over all pending tokens verifies them.

`LosslessDecoder.block` returns the full model's tokens. A draft costs the shallow segments and the head; when the
router is not sure, or enough drafts are pending, the last segment runs over the pending tokens and gives the full-depth
logits of every one. Greedy: the longest prefix of drafts that equals the full model's choices is accepted. Sampling:
speculative rejection (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318), so that each token
is distributed as the full model's. Rejected tokens are undone by lowering the lengths of the K/V buffers: nothing is
copied. Self-speculative decoding with early exits is due to LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710); here
the verifying run is the catch-up of lazy depth, so no layer runs twice for a token. Prompt-lookup drafts are verified
by the same run.
"""

from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import numpy as np

from tide_export.runtime.decoding.decoder import Block, Decoder, StepRequest, Token
from tide_export.runtime.decoding.prompt_lookup import PromptLookup
from tide_export.runtime.decoding.sampling import Sampler
from tide_export.runtime.sequence import SequenceState


class DraftLimits(NamedTuple):
    """How far a decoder may draft; the defaults are for bundles without a drafting record."""

    max_drafts: int = 6  # early exits that may await one verification; 0 never drafts by exits
    prompt_lookup: int = 8  # tokens of one prompt-lookup draft; 0 for none
    min_match: int = 2  # tokens that must have occurred before


class Draft(NamedTuple):
    """A token that is not verified yet."""

    id: int
    exit_layer: int
    layers_run: int
    choices: tuple[np.ndarray, np.ndarray] | None  # ids [n] and probabilities [n] it was drawn from; None: greedy


class LosslessDecoder(Decoder):
    """Drafts and verifies one sequence."""

    verifies = True

    def __init__(
        self,
        state: SequenceState,
        sampler: Sampler,
        depths: Sequence[int],
        limits: DraftLimits,
        stop: Container[int],
        context: int | None,
    ) -> None:
        """Takes over an empty sequence, which must take no steps but those that `block` requests.

        Only `full` may force a token through the last segment. Where it catches up with other sequences' tokens it is
        verified then: greedy tokens are the same, but drawn ones others.

        Args:
            depths: layers up to the end of each segment.
            stop: token ids that end a generation: nothing is drafted after one.
            context: tokens the sequence may have, None without a limit.
        """
        self._state = state
        self._sampler = sampler
        self._depths = depths
        self._max_drafts = limits.max_drafts
        self._lookup = PromptLookup(limits.prompt_lookup, limits.min_match)
        self._stop = stop
        self._context = context

    def save(self) -> Any:
        counts = self.drafted, self.accepted, self.lookup_drafted, self.lookup_accepted, self.undone
        return counts, self._sampler.save(), self._lookup.save()

    def restore(self, saved: Any) -> None:
        counts, sampler, lookup = saved
        self.drafted, self.accepted, self.lookup_drafted, self.lookup_accepted, self.undone = counts
        self._sampler.restore(sampler)
        self._lookup.restore(lookup)

    def block(self, ids: np.ndarray | list[int], max_tokens: int) -> Block:
        state, drafts = self._state, list[Draft]()
        if not state.length:
            self._lookup.extend(np.asarray(ids).tolist())
            max_tokens = 1  # a prompt is not worth a draft: it needs every layer
        limit = min(self._max_drafts, max_tokens - 1)
        while True:
            length = state.length + len(ids)
            ends = bool(drafts) and drafts[-1].id in self._stop
            ngram = [] if ends else self._prompt_lookup(drafts, max_tokens - 1 - len(drafts), length)
            context_full = self._context is not None and length == self._context
            verify = bool(ngram) or len(drafts) >= limit or context_full or ends
            positions = len(drafts) + len(ngram) + 1
            result = yield StepRequest([*ids, *ngram] if ngram else ids, positions, verify)
            passes = self._depths[result.segments_run - 1]
            if result.segments_run == len(self._depths):
                break
            drafts.append(Draft(*self._draw(result.logits, result.exit_layer, passes)))
            ids = [drafts[-1].id]
        early = len(drafts)
        drafts += [self._ngram_draft(token) for token in ngram]
        accepted, token = self._verify(drafts, result.position_logits)
        if ngram and accepted >= early:
            self._lookup.update(len(ngram), accepted - early)
        self.drafted += len(drafts)
        self.accepted += accepted
        self.lookup_drafted += len(ngram)
        self.lookup_accepted += max(accepted - early, 0)
        self.undone += len(drafts) - accepted
        state.rewind(state.length - (len(drafts) - accepted))
        wasted = sum(draft.layers_run for draft in drafts[accepted:])
        block = [
            *(Token(draft.id, draft.exit_layer, draft.layers_run) for draft in drafts[:accepted]),
            Token(token, result.exit_layer, passes + wasted),
        ]
        self._lookup.extend([token.id for token in block])
        return block

    def _prompt_lookup(self, drafts: list[Draft], max_tokens: int, length: int) -> list[int]:
        """A prompt-lookup draft after a sequence of `length` tokens that ends in `drafts`, up to a stop token."""
        if self._context is not None:
            max_tokens = min(max_tokens, self._context - length)
        ngram = self._lookup.draft([draft.id for draft in drafts], max_tokens)
        for number, token in enumerate(ngram):
            if token in self._stop:
                return ngram[: number + 1]
        return ngram

    def _ngram_draft(self, token: int) -> Draft:
        """A draft that was not drawn: as if from a distribution of this token alone."""
        choices = None if self._sampler.greedy else (np.array([token]), np.ones(1))
        return Draft(token, 0, 0, choices)

    def _draw(self, logits: np.ndarray, exit_layer: int, layers_run: int) -> Draft:
        if self._sampler.greedy:
            return Draft(self._sampler(logits), exit_layer, layers_run, None)
        choices = self._sampler.distribution(logits)
        return Draft(self._sampler.draw(*choices), exit_layer, layers_run, choices)

    def _verify(self, drafts: list[Draft], logits: np.ndarray) -> tuple[int, int]:
        """How many drafts are accepted and the full model's token after them, from its logits [len(drafts) + 1, V]."""
        for number, draft in enumerate(drafts):
            token = self._replacement(draft, logits[number])
            if token is not None:
                return number, token
        return len(drafts), self._sampler(logits[-1])

    def _replacement(self, draft: Draft, logits: np.ndarray) -> int | None:
        """The full model's token where the draft is rejected, None where it is accepted.

        With p the full model's probabilities and q those the draft was drawn from, it is accepted with probability
        min(1, p / q); else the token is drawn from max(p - q, 0), normalized.
        """
        if draft.choices is None:
            token = self._sampler(logits)
            return None if token == draft.id else token
        p = _dense(self._sampler.distribution(logits), len(logits))
        q = _dense(draft.choices, len(logits))
        if self._sampler.uniform() * q[draft.id] < p[draft.id]:
            return None
        rest = np.maximum(p - q, 0.0)
        (ids,) = rest.nonzero()
        return self._sampler.draw(ids, rest[ids])


def _dense(choices: tuple[np.ndarray, np.ndarray], vocabulary: int) -> np.ndarray:
    """Probabilities of all tokens, float64 [V]."""
    ids, probabilities = choices
    dense = np.zeros(vocabulary)
    dense[ids] = probabilities
    return dense
