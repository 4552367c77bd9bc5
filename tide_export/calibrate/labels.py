"""What a router learns to predict: may this token leave at this checkpoint?

Three answers. `agreement`, the default, is what a user of greedy decoding means: the exit's head gives the token the
full model gives. `kl` is for those who sample: the exit's distribution is within a bound of the full one. `cosine` is
TIDE's: the hidden state no longer turns, measured between raw states. (TIDE compares with a state behind the final
norm, so its labels mix turning with norming.)
"""

from collections.abc import Iterator

import torch

from tide_export.calibrate.collect import Sample
from tide_export.config import TideConfig
from tide_export.model import SourceModel

LOGITS_BYTES = 64 << 20  # logits made at a time; heads with scaling or soft capping hold a few copies of them


@torch.no_grad()
def normed(source: SourceModel, raw: torch.Tensor) -> torch.Tensor:
    """The final norm on raw states [n, D] on the CPU, a few thousand at a time: float32 [n, D'] on the CPU."""
    return torch.cat([source.normed(part.to(source.device)).float().cpu() for part in raw.split(8192)])


@torch.no_grad()
def top1(source: SourceModel, states: torch.Tensor) -> torch.Tensor:
    """The token the model's head ranks first, int64 [n], for normed states [n, D']."""
    return torch.cat([_logits(source, states[rows]).argmax(-1) for rows in blocks(source, len(states))])


@torch.no_grad()
def divergence(source: SourceModel, states: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """KL(full || exit) in nats, float32 [n], of the head's distributions for normed states [n, D'] of both."""
    parts = []
    for rows in blocks(source, len(states)):
        target = _logits(source, full[rows]).log_softmax(-1)
        parts.append((target.exp() * (target - _logits(source, states[rows]).log_softmax(-1))).sum(-1).clamp_min(0))
    return torch.cat(parts)


def may_leave(
    source: SourceModel, sample: Sample, config: TideConfig, layers: int, exits: torch.Tensor, full_top1: torch.Tensor
) -> torch.Tensor:
    """The labels of one checkpoint, bool [n].

    Args:
        exits: normed states [n, D'] of the exit after `layers` layers.
        full_top1: the full model's token, int64 [n].
    """
    last = sample.raw[source.num_layers]
    if config.label == "agreement":
        return top1(source, exits) == full_top1
    if config.label == "kl":
        return divergence(source, exits, normed(source, last)) < config.kl_bound
    return torch.cosine_similarity(sample.raw[layers], last, dim=-1) > config.convergence_threshold


def blocks(source: SourceModel, tokens: int) -> Iterator[slice]:
    """Slices of 0 .. tokens, each so small that the logits of a large vocabulary never exist as a whole."""
    rows = max(1, LOGITS_BYTES // (4 * source.vocab_size))
    yield from (slice(start, min(start + rows, tokens)) for start in range(0, tokens, rows))


def _logits(source: SourceModel, states: torch.Tensor) -> torch.Tensor:
    """float32 [n, V] on the CPU."""
    return source.head(states[None].to(source.device))[0].float().cpu()
