"""The loss of early-exit training and its gradient.

Follows LayerSkip (Elhoushi et al., https://arxiv.org/abs/2404.16710): every exit uses the model's own norm and head,
and its loss weighs more with depth. Unlike LayerSkip, the target of an exit is the distribution of full depth. Full
depth learns the distribution of the frozen original (distillation) and, if wanted, the next token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from tide_export.adaptation.config import AdaptConfig
from tide_export.calibration.labels import blocks
from tide_export.model.source import SourceModel


@dataclass(frozen=True)
class Batch:
    """The sequences of a training step, or some of them.

    Attributes:
        ids: int64 [B, S], padded on the right.
        lengths: tokens of each sequence, int64 [B].
    """

    ids: torch.Tensor
    lengths: torch.Tensor

    def positions(self) -> torch.Tensor:
        """Returns the indices of the tokens in the flattened [B * S] without padding, int64 [n]."""
        inside = torch.arange(self.ids.shape[1], device=self.ids.device) < self.lengths[:, None]
        return inside.flatten().nonzero()[:, 0]

    def labels(self) -> torch.Tensor:
        """Returns the next token at each of `positions`, int64 [n]; -100 at the end of a sequence."""
        following = torch.cat([self.ids[:, 1:], self.ids[:, :1]], dim=1)
        following = following.scatter(1, self.lengths[:, None] - 1, -100)
        return following.flatten()[self.positions()]

    def parts(self, size: int) -> "list[Batch]":
        """Splits into batches of at most `size` sequences, each without needless padding."""
        pairs = zip(self.ids.split(size), self.lengths.split(size), strict=True)
        return [Batch(ids[:, : int(lengths.max())], lengths) for ids, lengths in pairs]


def exit_weights(exits: Sequence[int], num_layers: int, config: AdaptConfig) -> dict[int, float]:
    """Returns the weight of each exit's loss; they sum to `config.early_weight`."""
    weights = {layers: (layers / num_layers) ** config.depth_power for layers in exits}
    return {layers: config.early_weight * weight / sum(weights.values()) for layers, weight in weights.items()}


def accumulate_gradients(
    source: SourceModel,
    hidden: Mapping[int, torch.Tensor],
    original: tuple[SourceModel, torch.Tensor],
    batch: Batch,
    weights: Mapping[int, float],
    config: AdaptConfig,
    tokens: int,
) -> dict[int, torch.Tensor]:
    """Adds the gradient of the batch's loss to the parameters of `source`.

    Logits exist for one block of tokens and one depth at a time. The gradient of a cross entropy with respect to its
    logits (softmax minus target) is computed directly, which halves the passes over [n, V]; it is accumulated on the
    hidden states, and the layers' backward pass runs once.

    Args:
        hidden: layers -> raw hidden states [B, S, D] with their graph, for every exit in `weights` and full depth.
        original: the frozen model and its raw hidden states after the last layer.
        weights: layers -> weight of the exit's loss.
        tokens: tokens of the whole step, by which the sums of losses are divided.

    Returns:
        layers -> the unweighted sum of the losses over the batch's tokens: for an exit, the cross entropy with full
        depth's distribution; for full depth, the divergence from the original.
    """
    positions, labels = batch.positions(), batch.labels()
    teacher, teacher_hidden = original[0], original[1].flatten(0, 1)[positions]
    leaves = {layers: one.detach().flatten(0, 1)[positions].requires_grad_() for layers, one in hidden.items()}
    sums = {layers: torch.zeros((), device=labels.device) for layers in hidden}
    distilled, learned = config.original_weight, config.label_weight
    for rows in blocks(source, len(positions)):
        with torch.no_grad():
            original_log = _logits(teacher, teacher_hidden[rows]).log_softmax(-1)
        logits = _logits(source, leaves[source.num_layers][rows])
        log = logits.detach().log_softmax(-1)
        expected, target = original_log.exp(), log.exp()
        sums[source.num_layers] += torch.linalg.vecdot(expected, original_log.sub_(log)).sum()
        labelled = labels[rows] != -100
        gradient = target * (distilled + learned * labelled)[:, None]
        gradient.sub_(expected, alpha=distilled)
        gradient[labelled, labels[rows][labelled]] -= learned
        logits.backward(gradient.div_(tokens))
        del logits, log, gradient, expected
        for layers, weight in weights.items():
            logits = _logits(source, leaves[layers][rows])
            log = logits.detach().log_softmax(-1)
            sums[layers] -= torch.linalg.vecdot(target, log).sum()
            logits.backward(log.exp_().sub_(target).mul_(weight / tokens))
    gradients = []
    for layers, one in hidden.items():
        gradient = torch.zeros_like(one).flatten(0, 1)
        gradient[positions] = cast(torch.Tensor, leaves[layers].grad)
        gradients.append(gradient.view_as(one))
    torch.autograd.backward(list(hidden.values()), gradients)
    return sums


def _logits(source: SourceModel, raw: torch.Tensor) -> torch.Tensor:
    """Computes float32 logits [n, V] of raw hidden states [n, D]."""
    return source.head(source.normalize(raw)[None])[0].float()
