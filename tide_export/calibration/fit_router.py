"""Fits the router of one checkpoint and calibrates its score to a probability.

Minimizes binary cross-entropy on the labels, by default without class weights. The validation split decides when to
stop and which weights are kept; Platt scaling on it (a factor and a bias on the logit, folded into the last layer)
makes the score a probability: of the tokens with score .9, 9 in 10 may exit.
"""

import copy
import math
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits

from tide_export.calibration.calibration_error import expected_calibration_error
from tide_export.calibration.config import TideConfig
from tide_export.errors import CalibrationError
from tide_export.routers.router import Router, summarize

BATCH_TOKENS = 1024
PATIENCE = 3  # epochs after which fitting stops if the validation loss has not fallen by MIN_GAIN
MIN_GAIN = 1e-4  # nats; with labels of one class the loss would fall forever
WEIGHT_DECAY = 0.01
_seeding = threading.Lock()  # PyTorch's default generator, which draws initial weights, is shared by all threads


@dataclass(frozen=True)
class LabelledHidden:
    """A split's tokens at one checkpoint: normalized float32 [n, D'], labels "may exit" bool [n]."""

    features: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True)
class FittedRouter:
    """A frozen router and its report (see `assess`)."""

    router: Router
    report: dict[str, Any]


def fit_router(
    train: LabelledHidden,
    validation: LabelledHidden,
    config: TideConfig,
    checkpoint: int,
    shortlist: torch.Tensor | None = None,
) -> FittedRouter:
    """Fits the router of `checkpoint`; thread-safe and deterministic.

    Args:
        config: used are the `router_*` fields, `class_balance`, `exit_threshold` and `seed`.
        checkpoint: layers run there; the seed depends on it.
        shortlist: rows of the head [N, D'], or None for a router of TIDE's form.

    Raises:
        CalibrationError: the loss is not a number.
    """
    generator = torch.Generator().manual_seed(config.seed * 1009 + checkpoint)
    with _seeding, torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed * 1009 + checkpoint)
        router = Router(train.features.shape[1], config.router_bottleneck_dim, shortlist)
    scaling = _Scaling(router, train.features)
    train_inputs, validation_inputs = scaling.inputs(train), scaling.inputs(validation)
    labels = train.labels.float()
    weights = _class_weights(labels) if config.class_balance else None
    trained = [parameter for parameter in router.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=config.router_learning_rate, weight_decay=WEIGHT_DECAY)

    best_loss, best_epoch, best = float("inf"), 0, copy.deepcopy(router.state_dict())
    epoch = last_gain = 0
    for epoch in range(1, config.router_epochs + 1):
        # The rate decays linearly to 0 over the possible epochs, so that the last steps average out noise.
        for group in optimizer.param_groups:
            group["lr"] = config.router_learning_rate * (1 - (epoch - 1) / config.router_epochs)
        for rows in torch.randperm(len(labels), generator=generator).split(BATCH_TOKENS):
            logits = router.logit_with(*scaling.batch(train_inputs, rows))
            batch_weights = weights[rows] if weights is not None else None
            loss = binary_cross_entropy_with_logits(logits, labels[rows], batch_weights)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        current = _loss(router, scaling, validation_inputs, validation.labels)
        if current < best_loss - MIN_GAIN:
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
    return FittedRouter(router, report)


@torch.no_grad()
def assess(router: Router, split: LabelledHidden, threshold: float) -> dict[str, Any]:
    """Measures a router on a split.

    Returns:
        `tokens`; `positive_rate`, the share of tokens that may exit; `mean_score`, equal to it for scores that are
        probabilities; `ece`, the expected calibration error over 15 bins of equally many tokens; `loss` (nats per
        token) and `base_loss`, that of the constant score `positive_rate`; `accuracy` of score > 0.5; and, for score >
        `threshold`, `exit_rate`, `precision` (share of the exits that may exit; None without exits) and `recall` (share
        of the tokens that may exit that do; None if none may).
    """
    labels = split.labels
    logits = torch.cat([router.logit(part) for part in split.features.split(8192)])
    scores, truth = logits.sigmoid(), labels.float()
    exits = scores > threshold
    correct = int((exits & labels).sum())
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
        "precision": correct / int(exits.sum()) if bool(exits.any()) else None,
        "recall": correct / int(labels.sum()) if bool(labels.any()) else None,
    }


class _Scaling:
    """Scales a router's inputs so that one learning rate suits all models.

    Scales normalized hidden states to unit size and the summary to two differences of unit deviation. Being linear, it
    can be folded into the weights.
    """

    def __init__(self, router: Router, features: torch.Tensor):
        self.router = router
        self.size = float(features.square().mean().sqrt().clamp_min(1e-12))
        if router.shortlist is not None:
            part = summarize(features[:8192], router.shortlist) @ _DIFFERENCES
            self.transform = _DIFFERENCES / part.std(0).clamp_min(1e-6)

    def inputs(self, split: LabelledHidden) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the split's unscaled hidden states and scaled summaries, to be used in all epochs."""
        if self.router.shortlist is None:
            return split.features, None
        summaries = [summarize(part, self.router.shortlist) @ self.transform for part in split.features.split(8192)]
        return split.features, torch.cat(summaries)

    def batch(
        self, inputs: tuple[torch.Tensor, torch.Tensor | None], rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Selects and scales the rows of a batch."""
        features, summaries = inputs  # `index_select` is three times as fast as `features[rows]`
        scaled = features.index_select(0, rows).div_(self.size)
        return scaled, None if summaries is None else summaries.index_select(0, rows)

    @torch.no_grad()
    def fold(self) -> None:
        """Folds the scaling into the router's weights."""
        self.router.down.weight /= self.size
        if self.router.shortlist is not None:
            self.router.confidence.weight.copy_(self.router.confidence.weight @ self.transform.T)


# Maps (first, second) to (first - second, first).
_DIFFERENCES = torch.tensor([[1.0, 1.0], [-1.0, 0.0]])


def _class_weights(labels: torch.Tensor) -> torch.Tensor:
    """Returns weights [n] that give each class half of the loss."""
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


def _platt(router: Router, validation: LabelledHidden) -> None:
    """Scales and shifts the logit so that scores are probabilities on `validation` (Platt 1999).

    Does nothing if all labels are of one class, for which no finite shift is optimal.
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
    scale, bias = float(factor.detach()), float(shift.detach())
    if not (math.isfinite(scale) and math.isfinite(bias)) or scale <= 0:
        # The router does not discriminate. A negative scale would fit noise, and unscaled scores are not probabilities,
        # so every token gets the share that may exit.
        scale, bias = 0.0, float(truth.mean().logit())
    with torch.no_grad():
        router.up.weight *= scale
        router.up.bias.copy_(router.up.bias * scale + bias)
