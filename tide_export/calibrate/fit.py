"""Fits one router to the sample of one checkpoint: fourth step of `calibrate`.

Plain logistic regression on the labels with the router in place of the line: binary cross-entropy without class
weights, so that a score can be read as a probability. The validation split decides when to stop and which weights are
kept, and gives the report.
"""

import copy
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from tide_export.config import TideConfig
from tide_export.errors import CalibrationError
from tide_export.routers import Router

logger = logging.getLogger("tide_export")

BATCH_TOKENS = 1024
PATIENCE = 4  # epochs after which fitting stops if the validation loss has not fallen
LEAST_GAIN = 1e-4  # by this much, in nats; labels of one class would go on falling towards zero for ever
WEIGHT_DECAY = 0.01


@dataclass(frozen=True)
class Fitted:
    """A router, frozen, with what the validation split says about it (see `assess`)."""

    router: Router
    report: dict[str, Any]


def fit_router(
    train: tuple[torch.Tensor, torch.Tensor],
    validation: tuple[torch.Tensor, torch.Tensor],
    config: TideConfig,
    checkpoint: int,
) -> Fitted:
    """Fits the router of `checkpoint`; the same arguments give the same weights.

    Args:
        train: normed states, float32 [n, D'], and labels, bool [n].
        validation: the same of other documents.
        config: `router_bottleneck_dim`, `router_epochs`, `router_learning_rate`, `exit_threshold`, `seed`.
        checkpoint: layers run there; part of the seed.

    Raises:
        CalibrationError: the loss is not a number.
    """
    features, labels = train[0], train[1].float()
    generator = torch.Generator().manual_seed(config.seed * 1009 + checkpoint)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed * 1009 + checkpoint)
        router = Router(features.shape[1], config.router_bottleneck_dim)
    # The size of normed states differs from model to model by orders of magnitude: fit to states of unit size, so that
    # one learning rate suits all, and afterwards fold the scale into the first layer.
    scale = float(features.square().mean().sqrt().clamp_min(1e-12))
    optimizer = torch.optim.AdamW(router.parameters(), lr=config.router_learning_rate, weight_decay=WEIGHT_DECAY)

    best_loss, best_epoch, best = float("inf"), 0, copy.deepcopy(router.state_dict())
    epoch = last_gain = 0
    for epoch in range(1, config.router_epochs + 1):
        for rows in torch.randperm(len(labels), generator=generator).split(BATCH_TOKENS):
            loss = binary_cross_entropy_with_logits(router.logit(features[rows] / scale), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        current = _loss(router, validation, scale)
        if current < best_loss - LEAST_GAIN:
            last_gain = epoch
        if current < best_loss:
            best_loss, best_epoch, best = current, epoch, copy.deepcopy(router.state_dict())
        if epoch - last_gain >= PATIENCE:
            break
    if best_epoch == 0:
        raise CalibrationError(f"the router at checkpoint {checkpoint} cannot be fitted: its loss is not a number")
    router.load_state_dict(best)
    with torch.no_grad():
        router.down.weight /= scale
    router.eval().requires_grad_(False)

    report = assess(router, *validation, config.exit_threshold)
    report |= {"epochs": epoch, "best_epoch": best_epoch, "train_tokens": len(labels)}
    report["train_positive_rate"] = float(labels.mean())
    return Fitted(router, report)


@torch.no_grad()
def assess(router: Router, features: torch.Tensor, labels: torch.Tensor, threshold: float) -> dict[str, Any]:
    """What a router does on normed states [n, D'] with labels bool [n].

    Returns a dict of `tokens`; `positive_rate`, the share that may leave; `mean_score`, equal to it for scores that are
    probabilities; `loss` (nats per token) and `base_loss`, that of always answering `positive_rate`; `accuracy` of
    score > 0.5; and, for score > `threshold`, `exit_rate`, `precision` (share of the exits that may leave) and `recall`
    (share of those that may leave which exit). Precision is None where nothing exits, recall where nothing may leave.
    """
    logits = torch.cat([router.logit(part) for part in features.split(8192)])
    scores, truth = logits.sigmoid(), labels.float()
    exits = scores > threshold
    right = int((exits & labels).sum())
    rate = truth.mean()
    return {
        "tokens": len(labels),
        "positive_rate": float(rate),
        "mean_score": float(scores.mean()),
        "loss": float(binary_cross_entropy_with_logits(logits, truth)),
        "base_loss": float(torch.nn.functional.binary_cross_entropy(rate, rate)),
        "accuracy": float(((scores > 0.5) == labels).float().mean()),
        "threshold": threshold,
        "exit_rate": float(exits.float().mean()),
        "precision": right / int(exits.sum()) if bool(exits.any()) else None,
        "recall": right / int(labels.sum()) if bool(labels.any()) else None,
    }


@torch.no_grad()
def _loss(router: Router, split: tuple[torch.Tensor, torch.Tensor], scale: float) -> float:
    logits = torch.cat([router.logit(part / scale) for part in split[0].split(8192)])
    return float(binary_cross_entropy_with_logits(logits, split[1].float()))
