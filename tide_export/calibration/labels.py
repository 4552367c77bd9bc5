"""What a router learns to predict: may this token leave at this checkpoint?

Three answers. `agreement`, the default, is what a user of greedy decoding means: the exit's head gives the token the
full model gives. `kl` is for those who sample: the exit's distribution is within a bound of the full one. `cosine` is
TIDE's: the hidden state no longer turns, measured between raw states. (TIDE compares with a state behind the final
norm, so its labels mix turning with norming.)
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tide_export.calibration.collect import Sample
from tide_export.calibration.parallel import in_parallel
from tide_export.config import TideConfig
from tide_export.model.source import SourceModel

LOGITS_BYTES = 64 << 20  # logits made at a time; heads with scaling or soft capping hold a few copies of them
LOGITS_ROWS = 512  # tokens of one block at most: with a small vocabulary its logits stay in the processor's cache


@dataclass(frozen=True)
class Answers:
    """Logits of n tokens, float32 [n, V] where the head computed them; what is asked of them comes to the CPU."""

    logits: torch.Tensor

    def first(self) -> torch.Tensor:
        """The token ranked first, int64 [n]."""
        return self.logits.argmax(-1).cpu()

    def agree(self, tokens: torch.Tensor) -> torch.Tensor:
        """Whether each of `tokens`, int64 [n], is ranked first, bool [n]; told sooner than which one is."""
        return (self._of(tokens) == self.logits.amax(-1)).cpu()

    def nll(self, tokens: torch.Tensor) -> torch.Tensor:
        """-log P of each of `tokens`, int64 [n], in nats, float32 [n]."""
        return (self.logits.logsumexp(-1) - self._of(tokens)).cpu()

    def _of(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.logits.gather(-1, tokens.to(self.logits.device)[:, None])[:, 0]


class Target:
    """The full model's distribution for n tokens, from which the divergence of several exits is asked."""

    def __init__(self, full: Answers):
        own = full.logits.log_softmax(-1)
        self.probabilities = own.exp()
        self.sum = self.probabilities.sum(-1)  # 1 but for rounding, which large logits would make much of
        self.negative_entropy = torch.linalg.vecdot(self.probabilities, own)

    def divergence(self, exit_: Answers) -> torch.Tensor:
        """KL(full || exit) in nats, float32 [n], as cross entropy less entropy: no second distribution is made."""
        cross = self.sum * exit_.logits.logsumexp(-1) - torch.linalg.vecdot(self.probabilities, exit_.logits)
        return (self.negative_entropy + cross).clamp_min(0).cpu()


@torch.no_grad()
def answers(source: SourceModel, states: torch.Tensor) -> Answers:
    """What the head says for normalized states [n, D']."""
    return Answers(source.head(states[None].to(source.device))[0].float())


@torch.no_grad()
def normalize(source: SourceModel, raw: torch.Tensor) -> torch.Tensor:
    """The final norm on raw states [n, D] on the CPU, a few thousand at a time: float32 [n, D'] on the CPU."""
    return torch.cat([source.normalize(part.to(source.device)).float().cpu() for part in raw.split(8192)])


def top1(source: SourceModel, states: torch.Tensor) -> torch.Tensor:
    """The token the model's head ranks first, int64 [n], for normalized states [n, D']."""

    def first(rows: slice) -> torch.Tensor:
        return answers(source, states[rows]).first()

    return torch.cat(list(in_parallel(source, first, blocks(source, len(states)))))


def divergence(source: SourceModel, states: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """KL(full || exit) in nats, float32 [n], of the head's distributions for normalized states [n, D'] of both."""

    @torch.no_grad()
    def between(rows: slice) -> torch.Tensor:
        return Target(answers(source, full[rows])).divergence(answers(source, states[rows]))

    return torch.cat(list(in_parallel(source, between, blocks(source, len(states)))))


def agreement(source: SourceModel, states: torch.Tensor, full_top1: torch.Tensor) -> torch.Tensor:
    """Whether the head ranks the full model's token, int64 [n], first for normalized states [n, D'], bool [n]."""

    def same(rows: slice) -> torch.Tensor:
        return answers(source, states[rows]).agree(full_top1[rows])

    return torch.cat(list(in_parallel(source, same, blocks(source, len(states)))))


@torch.no_grad()
def may_leave(
    source: SourceModel, sample: Sample, config: TideConfig, layers: int, exits: torch.Tensor, full_top1: torch.Tensor
) -> torch.Tensor:
    """The labels of one checkpoint, bool [n].

    Args:
        exits: normalized states [n, D'] of the exit after `layers` layers.
        full_top1: the full model's token, int64 [n].
    """
    last = sample.raw[source.num_layers]
    if config.label == "agreement":
        return agreement(source, exits, full_top1)
    if config.label == "kl":
        return divergence(source, exits, normalize(source, last)) < config.kl_bound
    return torch.cosine_similarity(sample.raw[layers], last, dim=-1) > config.convergence_threshold


def blocks(source: SourceModel, tokens: int) -> Iterator[slice]:
    """Slices of 0 .. tokens, each so small that the logits of a large vocabulary never exist as a whole."""
    rows = max(1, min(LOGITS_BYTES // (4 * source.vocab_size), LOGITS_ROWS))
    yield from (slice(start, min(start + rows, tokens)) for start in range(0, tokens, rows))
