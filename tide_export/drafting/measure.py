"""Measures the share of drafts accepted in held-out answers, without running the drafter in a runtime.

Full depth samples `argmax(logits / T + noise)` with Gumbel noise, and a drafter drafts by its own logits with the same
noise (coupled draws). The noise of the stored answers is not needed: given the sampled token, the largest sum of logit
and noise is again a Gumbel variable, and the sum of each other token is a Gumbel variable truncated at it (Maddison et
al. 2014, https://arxiv.org/abs/1411.0030). Noise drawn from that distribution is distributed jointly with the answer
as the real noise, so the share of drafts equal to the answer's token is an unbiased estimate of the acceptance.

Draft `k` counts only at rows whose previous `k - 1` drafts equal the answer's tokens. Greedy acceptance compares with
the most likely token at the same rows; the text before it is the sampled one, so it is an estimate for such text.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from tide_export.calibration.distributed import Processes
from tide_export.drafting.network import DrafterNetwork
from tide_export.drafting.store import Answer, AnswerStore
from tide_export.drafting.target import Target
from tide_export.routers.drafter_weights import CONFIDENCES

DRAFTS = 4  # measured drafts of a chain
CHUNK = 256  # positions whose logits are computed at once
PRIOR = 4.0  # weight, in drafts, of an interval's middle scaled to the acceptance of all drafts
TINY = 1e-20


@dataclass(frozen=True)
class Acceptance:
    """Shares of accepted drafts.

    Attributes:
        sampled: share accepted of draft 1, 2, ... whose predecessors were accepted, at the answers' temperature.
        greedy: likewise at temperature 0.
        by_confidence: share accepted of first drafts for each interval of `CONFIDENCES`.
        drafts: number of first drafts counted.
    """

    sampled: tuple[float, ...]
    greedy: tuple[float, ...]
    by_confidence: tuple[float, ...]
    drafts: int


@dataclass(frozen=True, eq=False)
class _Drawn:
    """The output of full depth for each hidden state of an answer, independent of the drafter."""

    normalizers: torch.Tensor  # log of the sum of exp(logits / T), [S]
    likeliest: torch.Tensor  # token ids, [S]


class HeldOut:
    """The held-out answers, on which drafters are measured."""

    def __init__(self, target: Target, store: AnswerStore, temperature: float, seed: int, processes: Processes) -> None:
        """Takes the answers of `store`; `seed` makes the noise the same in each measurement."""
        self._target, self._store, self._temperature = target, store, temperature
        self._seed, self._processes = seed, processes
        self._drawn: dict[int, _Drawn] = {}

    @property
    def answers(self) -> list[Answer]:
        """The held-out answers with a token to draft: those of at least two tokens."""
        return [answer for answer in self._store.answers if answer.held_out and answer.new_tokens > 1]

    @torch.no_grad()
    def measure(self, network: DrafterNetwork, tokens: torch.Tensor, answers: int | None = None) -> Acceptance:
        """Measures `network` on its own device; processes divide the answers among them.

        Args:
            tokens: the drafter's tokens, int64 [n], ascending.
            answers: how many answers to measure on; None: all.
        """
        counts: NDArray[np.float64] = np.zeros((2, DRAFTS, 2))  # sampled and greedy; accepted and drafted
        confident: NDArray[np.float64] = np.zeros((len(CONFIDENCES), 2))
        for answer in self.answers[:answers][self._processes.rank :: self._processes.count]:
            self._count(answer, network, tokens, counts, confident)
        gathered = self._processes.gather((counts, confident))
        counts = np.sum([one for one, _ in gathered], axis=0)
        confident = np.sum([one for _, one in gathered], axis=0)
        shares = counts[..., 0] / np.maximum(counts[..., 1], 1)
        middles = (np.array(CONFIDENCES) + np.array([*CONFIDENCES[1:], 1.0])) / 2
        calibration = min(1.0, confident[:, 0].sum() / max(1.0, float(middles @ confident[:, 1])))
        by_confidence = (confident[:, 0] + PRIOR * calibration * middles) / (confident[:, 1] + PRIOR)
        sampled, greedy = (tuple(map(float, row)) for row in shares)
        return Acceptance(sampled, greedy, tuple(map(float, by_confidence)), int(counts[0, 0, 1]))

    def _count(
        self,
        answer: Answer,
        network: DrafterNetwork,
        tokens: torch.Tensor,
        counts: np.ndarray,
        confident: np.ndarray,
    ) -> None:
        device = network.center.device
        hidden = self._store.hidden(answer).float().to(device)
        ids = torch.from_numpy(answer.ids).long().to(device)
        drawn = self._drawn_of(answer, hidden)
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + answer.number)
        embeddings = functional.embedding(ids, self._target.embeddings)
        begin = max(answer.prompt, 1)  # the first draft is for the second new token, at this hidden state
        length = len(hidden)
        chains = torch.arange(begin - 1, length, device=device)
        outputs = [rows[0] for rows in network.draft_steps(embeddings[None], hidden[None], chains[None], DRAFTS)]
        # Indexed by draft and by the row at which its chain began.
        accepted = torch.zeros(DRAFTS, length, dtype=torch.bool)
        greedy_text, greedy_likeliest = torch.zeros_like(accepted), torch.zeros_like(accepted)
        for first in range(begin, length, CHUNK):
            at = torch.arange(first, min(first + CHUNK, length), device=device)
            noise = self._noise(network, tokens, hidden[at], ids[at + 1], drawn.normalizers[at], generator)
            for draft, rows in enumerate(outputs):
                kept = at - draft >= begin  # drafts of chains that began in the answer
                chunk = at[kept]
                starts = (chunk - draft - 1).cpu()
                logits = network.logits(rows[chunk - draft - begin])
                sampled = (logits / self._temperature + noise[kept]).argmax(-1)
                likeliest = tokens[logits.argmax(-1)]
                accepted[draft, starts] = (tokens[sampled] == ids[chunk + 1]).cpu()
                greedy_text[draft, starts] = (likeliest == ids[chunk + 1]).cpu()
                greedy_likeliest[draft, starts] = (likeliest == drawn.likeliest[chunk]).cpu()
                if draft == 0:
                    chances = torch.softmax(logits / self._temperature, -1).gather(-1, sampled[:, None])[:, 0]
                    intervals = np.searchsorted(CONFIDENCES, chances.cpu().numpy(), side="right") - 1
                    weights = accepted[0, starts].numpy().astype(np.float64)
                    confident[:, 0] += np.bincount(intervals, weights, len(CONFIDENCES))
                    confident[:, 1] += np.bincount(intervals, minlength=len(CONFIDENCES))
        for kind, (equal, before) in enumerate(((accepted, accepted), (greedy_likeliest, greedy_text))):
            alive = torch.zeros(length, dtype=torch.bool)
            alive[begin - 1 : length - 1] = True
            for draft in range(DRAFTS):
                alive[max(0, length - draft - 1) :] = False  # chains that would draft beyond the answer
                counts[kind, draft] += int((equal[draft] & alive).sum()), int(alive.sum())
                alive = alive & before[draft]

    def _drawn_of(self, answer: Answer, hidden: torch.Tensor) -> _Drawn:
        if answer.number not in self._drawn:
            head, bias = self._target.head, self._target.bias
            normalizers, likeliest = list[torch.Tensor](), list[torch.Tensor]()
            for part in hidden.split(CHUNK):
                logits = functional.linear(part, head, bias)
                normalizers.append(torch.logsumexp(logits / self._temperature, -1))
                likeliest.append(logits.argmax(-1))
            self._drawn[answer.number] = _Drawn(torch.cat(normalizers), torch.cat(likeliest))
        return self._drawn[answer.number]

    def _noise(
        self,
        network: DrafterNetwork,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        following: torch.Tensor,
        normalizers: torch.Tensor,
        generator: torch.Generator,
    ) -> torch.Tensor:
        """Draws the noise of the drafter's tokens [N, n], given the tokens `following` [N] that were drawn."""
        logits = network.logits(hidden) / self._temperature
        largest = normalizers[:, None] + _gumbel((len(hidden), 1), generator).to(hidden.device)
        below = logits + _gumbel((len(hidden), len(tokens)), generator).to(hidden.device)
        sums = -torch.logaddexp(-largest, -below)
        return torch.where(tokens[None] == following[:, None], largest, sums) - logits


def _gumbel(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64).clamp_min(TINY)
    return -torch.log(-torch.log(uniform)).float()
