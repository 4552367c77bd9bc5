"""Fits one router to the sample of one checkpoint, and makes its score a probability: part of `calibrate`.

Plain logistic regression on the labels with the router in place of the line: binary cross-entropy, by default without
class weights. The validation split decides when to stop, which weights are kept, and by Platt scaling (a factor and a
bias on the logit, both folded into the last layer) what a score is worth: .9 should mean that 9 in 10 may leave.
"""

import copy
import math
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits

from tide_export.calibration.calibration_error import expected_calibration_error
from tide_export.config import TideConfig
from tide_export.errors import CalibrationError
from tide_export.routers.router import Router, summarize

BATCH_TOKENS = 1024
PATIENCE = 3  # epochs after which fitting stops if the validation loss has not fallen
LEAST_GAIN = 1e-4  # by this much, in nats; labels of one class would go on falling towards zero for ever
WEIGHT_DECAY = 0.01
_seeding = threading.Lock()  # PyTorch's own generator, which draws a router's first weights, is one for all threads


@dataclass(frozen=True)
class Labelled:
    """Tokens of a split at one checkpoint: normalized states, float32 [n, D'], and whether each may exit, bool [n]."""

    features: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True)
class Fitted:
    """A router, frozen, with what the splits say about it (see `assess`)."""

    router: Router
    report: dict[str, Any]


def fit_router(
    train: Labelled, validation: Labelled, config: TideConfig, checkpoint: int, shortlist: torch.Tensor | None = None
) -> Fitted:
    """Fits the router of `checkpoint`; the same arguments give the same weights. Several may be fitted at a time.

    Args:
        config: the `router_*` fields, `class_balance`, `exit_threshold`, `seed`.
        checkpoint: layers run there; part of the seed.
        shortlist: rows of the head [N, D'], or None for a router of TIDE's form.

    Raises:
        CalibrationError: the loss is not a number.
    """
    generator = torch.Generator().manual_seed(config.seed * 1009 + checkpoint)
    with _seeding, torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed * 1009 + checkpoint)
        router = Router(train.features.shape[1], config.router_bottleneck_dim, shortlist)
    scaling = _Scaling(router, train.features)
    known, unknown = scaling.inputs(train), scaling.inputs(validation)
    labels = train.labels.float()
    weights = _class_weights(labels) if config.class_balance else None
    trained = [parameter for parameter in router.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=config.router_learning_rate, weight_decay=WEIGHT_DECAY)

    best_loss, best_epoch, best = float("inf"), 0, copy.deepcopy(router.state_dict())
    epoch = last_gain = 0
    for epoch in range(1, config.router_epochs + 1):
        # From the whole rate to none over the epochs there may be: the last steps average the noise away.
        for group in optimizer.param_groups:
            group["lr"] = config.router_learning_rate * (1 - (epoch - 1) / config.router_epochs)
        for rows in torch.randperm(len(labels), generator=generator).split(BATCH_TOKENS):
            logits = router.logit_with(*scaling.batch(known, rows))
            chosen = weights[rows] if weights is not None else None
            loss = binary_cross_entropy_with_logits(logits, labels[rows], chosen)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        current = _loss(router, scaling, unknown, validation.labels)
        if current < best_loss - LEAST_GAIN:
            last_gain = epoch
        if current < best_loss:
            best_loss, best_epoch, best = current, epoch, copy.deepcopy(router.state_dict())
        if epoch - last_gain >= PATIENCE:
            break
    if best_epoch == 0:
        raise CalibrationError(f"the router at checkpoint {checkpoint} cannot be fitted: its loss is not a number")
    router.load_state_dict(best)
    scaling.fold()
    router.eval().requires_grad_(False)

    before = expected_calibration_error(_scores(router, validation.features), validation.labels.numpy())
    _platt(router, validation)
    report = assess(router, validation, config.exit_threshold)
    report |= {"ece_before_scaling": before, "epochs": epoch, "best_epoch": best_epoch, "train_tokens": len(labels)}
    report["train_positive_rate"] = float(labels.mean())
    return Fitted(router, report)


@torch.no_grad()
def assess(router: Router, split: Labelled, threshold: float) -> dict[str, Any]:
    """What a router does on a split.

    Returns a dict of `tokens`; `positive_rate`, the share that may leave; `mean_score`, equal to it for scores that are
    probabilities; `ece`, the expected calibration error over 15 bins of equally many tokens; `loss` (nats per token)
    and `base_loss`, that of always answering `positive_rate`; `accuracy` of score > 0.5; and, for score > `threshold`,
    `exit_rate`, `precision` (share of the exits that may leave) and `recall` (share of those that may leave which
    exit). Precision is None where nothing exits, recall where nothing may leave.
    """
    labels = split.labels
    logits = torch.cat([router.logit(part) for part in split.features.split(8192)])
    scores, truth = logits.sigmoid(), labels.float()
    exits = scores > threshold
    right = int((exits & labels).sum())
    rate = truth.mean()
    return {
        "tokens": len(labels),
        "positive_rate": float(rate),
        "mean_score": float(scores.mean()),
        "ece": expected_calibration_error(scores.numpy(), labels.numpy()),
        "loss": float(binary_cross_entropy_with_logits(logits, truth)),
        "base_loss": float(binary_cross_entropy(rate, rate)),
        "accuracy": float(((scores > 0.5) == labels).float().mean()),
        "threshold": threshold,
        "exit_rate": float(exits.float().mean()),
        "precision": right / int(exits.sum()) if bool(exits.any()) else None,
        "recall": right / int(labels.sum()) if bool(labels.any()) else None,
    }


class _Scaling:
    """Scales a router's inputs so that one learning rate suits all models: normalized states to unit size, the summary
    to two differences of unit deviation. Linear, hence foldable into the weights."""

    def __init__(self, router: Router, features: torch.Tensor):
        self.router = router
        self.size = float(features.square().mean().sqrt().clamp_min(1e-12))
        if router.shortlist is not None:
            part = summarize(features[:8192], router.shortlist) @ _DIFFERENCES
            self.turn = _DIFFERENCES / part.std(0).clamp_min(1e-6)

    def inputs(self, split: Labelled) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The split's states as they are, and its summaries, scaled: computed once, not in every epoch."""
        if self.router.shortlist is None:
            return split.features, None
        summaries = [summarize(part, self.router.shortlist) @ self.turn for part in split.features.split(8192)]
        return split.features, torch.cat(summaries)

    def batch(
        self, inputs: tuple[torch.Tensor, torch.Tensor | None], rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        features, summaries = inputs  # `index_select` copies rows as they lie, three times as fast as `features[rows]`
        chosen = features.index_select(0, rows).div_(self.size)
        return chosen, None if summaries is None else summaries.index_select(0, rows)

    @torch.no_grad()
    def fold(self) -> None:
        self.router.down.weight /= self.size
        if self.router.shortlist is not None:
            self.router.confidence.weight.copy_(self.router.confidence.weight @ self.turn.T)


# From (first, second) to (first - second, first).
_DIFFERENCES = torch.tensor([[1.0, 1.0], [-1.0, 0.0]])


def _class_weights(labels: torch.Tensor) -> torch.Tensor:
    """Weights [n] that give both classes half of the loss."""
    rate = float(labels.mean().clamp(1e-6, 1 - 1e-6))
    return torch.where(labels > 0.5, 0.5 / rate, 0.5 / (1 - rate))


@torch.no_grad()
def _loss(
    router: Router, scaling: _Scaling, inputs: tuple[torch.Tensor, torch.Tensor | None], labels: torch.Tensor
) -> float:
    parts = torch.arange(len(labels)).split(8192)
    logits = torch.cat([router.logit_with(*scaling.batch(inputs, rows)) for rows in parts])
    return float(binary_cross_entropy_with_logits(logits, labels.float()))


@torch.no_grad()
def _scores(router: Router, features: torch.Tensor):
    return torch.cat([router(part) for part in features.split(8192)]).numpy()


def _platt(router: Router, validation: Labelled) -> None:
    """Scales and shifts the logit so that the scores are probabilities on `validation` (Platt 1999), in place.

    Left as it is where the labels are all of one class: any large shift would do, and none would mean anything.
    """
    truth = validation.labels.float()
    if not 0 < float(truth.mean()) < 1:
        return
    with torch.no_grad():
        logits = torch.cat([router.logit(part) for part in validation.features.split(8192)])
    factor, shift = torch.ones((), requires_grad=True), torch.zeros((), requires_grad=True)
    optimizer = torch.optim.LBFGS([factor, shift], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> float:
        optimizer.zero_grad()
        value = binary_cross_entropy_with_logits(logits * factor + shift, truth)
        value.backward()
        return float(value.detach())

    optimizer.step(loss)
    found = float(factor.detach()), float(shift.detach())
    if not all(math.isfinite(value) for value in found) or found[0] <= 0:
        # A router that tells nothing apart: turning its scores round would only fit noise, and leaving them where
        # they started would promise what is not so. What is known of every token is the share that may leave.
        found = 0.0, float(truth.mean().logit())
    with torch.no_grad():
        router.up.weight *= found[0]
        router.up.bias.copy_(router.up.bias * found[0] + found[1])
