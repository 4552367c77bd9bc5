"""Lossless mode: tokens that exit early are drafts, and the deep segments' run over all pending tokens verifies them.

`LosslessDecoder.block` returns the full model's tokens. A draft costs the shallow segments and the head; when the
router is not sure, or enough drafts are pending, the last segment runs over the pending tokens and gives the full-depth
logits of every one. From these the sampler chooses each token as mode `full` does, with the same random number and
after the same processing; a draft is accepted where it is that token. So greedy and sampled tokens are those of `full`
with the same seed. For a draft that is one token, not drawn, this accepts as often as speculative rejection (Leviathan
et al. 2023, arXiv 2211.17192). Rejected tokens are undone by lowering the lengths of the K/V buffers: nothing is
copied. Self-speculative decoding with early exits is due to LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710); here
the verifying run is the catch-up of lazy depth, so no layer runs twice for a token. Prompt-lookup drafts are verified
by the same run. `acceptance` estimates whether a draft pays.
"""

from collections.abc import Container, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tide_export.bundle.manifest import DEFAULT_VERIFY_COSTS, Drafting, Manifest
from tide_export.runtime.decoding.acceptance import Acceptance, Balance
from tide_export.runtime.decoding.decoder import Block, Decoder, StepRequest, Token
from tide_export.runtime.decoding.prompt_lookup import PromptLookup
from tide_export.runtime.decoding.sampling import Sampler
from tide_export.runtime.sequence import Candidates, SequenceState
from tide_export.thresholds.resolve import MAX_THRESHOLD

HEAD_COST = 0.1  # of a step of full depth, of 28 and 135 million parameters
TOKEN_VALUE = 0.75  # steps of full depth that an accepted draft saves


class DraftLimits(NamedTuple):
    """How far a decoder may draft, as `manifest.Drafting`."""

    max_drafts: int  # 0 never drafts by exits
    prompt_lookup: int
    draft_costs: tuple[float, ...]
    verify_costs: tuple[float, ...]


def default_drafting(manifest: Manifest) -> Drafting:
    """How a bundle drafts that was not tuned: by its exits, where an accepted one is expected to be worth its cost."""
    costs = tuple(HEAD_COST + layers / manifest.model.num_layers for layers in manifest.checkpoints)
    thresholds = tuple(
        value if cost + DEFAULT_VERIFY_COSTS[0] < TOKEN_VALUE else MAX_THRESHOLD
        for value, cost in zip(manifest.thresholds, costs, strict=True)
    )
    return Drafting(thresholds, 6, 8, costs, DEFAULT_VERIFY_COSTS, {})


class Draft(NamedTuple):
    """A token that is not verified yet."""

    id: int
    exit_layer: int
    layers_run: int
    source: int = -1  # see `acceptance`; -1: an early exit


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

        Args:
            depths: layers up to the end of each segment.
            stop: token ids that end a generation: nothing is drafted after one.
            context: tokens the sequence may have, None without a limit.
        """
        self._state = state
        self._sampler = sampler
        self._depths = depths
        self._max_drafts = limits.max_drafts
        self._max_ngram = limits.prompt_lookup
        self._draft_costs = limits.draft_costs
        self._verify_cost = partial(_verify_cost, limits.verify_costs)
        self._lookup, self._acceptance = PromptLookup(), Acceptance()
        self._exits, self._ngrams = Balance(), Balance()
        self._stop = stop
        self._context = context

    def save(self) -> Any:
        counts = self.drafted, self.accepted, self.lookup_drafted, self.lookup_accepted, self.undone
        balances = self._exits.steps, self._ngrams.steps
        return counts, balances, self._sampler.save(), self._lookup.save(), self._acceptance.save()

    def restore(self, saved: Any) -> None:
        counts, balances, sampler, lookup, acceptance = saved
        self.drafted, self.accepted, self.lookup_drafted, self.lookup_accepted, self.undone = counts
        self._exits.steps, self._ngrams.steps = balances
        self._sampler.restore(sampler)
        self._lookup.restore(lookup)
        self._acceptance.restore(acceptance)

    def block(self, ids: np.ndarray | list[int], max_tokens: int) -> Block:
        state, drafts = self._state, list[Draft]()
        if not state.length:
            self._extend(np.asarray(ids).tolist())
            max_tokens = 1  # a prompt is not worth a draft: it needs every layer
        limit, cost = min(self._max_drafts, max_tokens - 1), 0.0
        while True:
            length = state.length + len(ids)
            ends = bool(drafts) and drafts[-1].id in self._stop
            may_exit = len(drafts) < limit and cost < self._exits.steps and not ends and length != self._context
            ngram = [] if ends else self._ngram(drafts, max_tokens - 1 - len(drafts), length)
            tokens = [*ids, *(draft.id for draft in ngram)] if ngram else ids
            result = yield StepRequest(tokens, len(drafts) + len(ngram) + 1, bool(ngram) or not may_exit)
            passes = self._depths[result.segments_run - 1]
            if result.segments_run == len(self._depths):
                break
            drafts.append(Draft(self._sampler.draft(result.choice), result.exit_layer, passes))
            cost += self._draft_costs[result.segments_run - 1]
            ids = [drafts[-1].id]
        early = len(drafts)
        drafts += ngram
        accepted, token = self._verify(drafts, result.choices)
        ngram_accepted = max(accepted - early, 0)
        if accepted >= early:
            self._acceptance.record([draft.source for draft in ngram], ngram_accepted)
        exits_cost = self._verify_cost(early)
        self._exits.settle(accepted - ngram_accepted, cost + exits_cost, accepted + 1)
        self._ngrams.settle(ngram_accepted, self._verify_cost(len(drafts)) - exits_cost, accepted + 1)
        self.drafted += len(drafts)
        self.accepted += accepted
        self.lookup_drafted += len(ngram)
        self.lookup_accepted += ngram_accepted
        self.undone += len(drafts) - accepted
        state.rewind(state.length - (len(drafts) - accepted))
        wasted = sum(draft.layers_run for draft in drafts[accepted:])
        block = [
            *(Token(draft.id, draft.exit_layer, draft.layers_run) for draft in drafts[:accepted]),
            Token(token, result.exit_layer, passes + wasted),
        ]
        self._extend([token.id for token in block])
        return block

    def _extend(self, ids: list[int]) -> None:
        """Adds tokens to the text that is searched."""
        if self._max_ngram:
            self._lookup.extend(ids)

    def _ngram(self, drafts: list[Draft], max_tokens: int, length: int) -> list[Draft]:
        """A prompt-lookup draft after a sequence of `length` tokens that ends in `drafts`: up to a stop token, and as
        long as the next token is expected to save more than verifying it costs."""
        if self._context is not None:
            max_tokens = min(max_tokens, self._context - length)
        limit, exits_cost = min(max_tokens, self._max_ngram), self._verify_cost(len(drafts))
        tokens, ngram, share = [draft.id for draft in drafts], list[Draft](), 1.0
        while len(ngram) < limit and not (ngram and tokens[-1] in self._stop):
            match = self._lookup.next(tokens)
            cost = self._verify_cost(len(tokens))
            if match is None or cost - exits_cost > self._ngrams.steps:
                break
            share *= self._acceptance.of(match.source)
            if share * TOKEN_VALUE < self._verify_cost(len(tokens) + 1) - cost:
                break
            if not self._sampler.take_draft(match.token):
                break
            ngram.append(Draft(match.token, 0, 0, match.source))
            tokens.append(match.token)
        return ngram

    def _verify(self, drafts: list[Draft], logits: np.ndarray | Sequence[Candidates]) -> tuple[int, int]:
        """How many drafts are accepted and the full model's token after them, from its logits at each and after."""
        for number, draft in enumerate(drafts):
            token = self._sampler(logits[number])
            if token != draft.id:
                return number, token
        return len(drafts), self._sampler(logits[-1])


def _verify_cost(costs: Sequence[float], drafts: int) -> float:
    """What verifying drafts costs, from the costs of 1, 2, 4, 8 and 16."""
    if not drafts:
        return 0.0
    k = min(drafts.bit_length() - 1, len(costs) - 2)
    return costs[k] + (drafts - 2**k) * (costs[k + 1] - costs[k]) / 2**k
