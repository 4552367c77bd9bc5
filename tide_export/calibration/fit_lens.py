"""Fits the lens of one checkpoint, with `exit_strategy = "lens"`: between `collect` and the labels.

A tuned lens (Belrose et al., https://arxiv.org/abs/2303.08112) of low rank minimizes the KL divergence of the head's
distribution for its output from the full model's; everything else is frozen. The epoch with the smallest validation
loss is kept, the identity included, so that on this split a lens is never worse than none.
"""

import copy
from typing import Any

import torch

from tide_export.calibration.collect import Sample
from tide_export.calibration.labels import blocks, divergence, normalize
from tide_export.config import TideConfig
from tide_export.errors import CalibrationError
from tide_export.model.source import SourceModel
from tide_export.routers.router import Lens

BATCH_TOKENS = 512
VALIDATION_TOKENS = 4096


def fit_lens(
    source: SourceModel, train: Sample, validation: Sample, config: TideConfig, checkpoint: int
) -> tuple[Lens, dict[str, Any]]:
    """Fits the lens of `checkpoint`.

    Returns:
        The lens, and its report: `kl_before` and `kl_after` on validation tokens, `best_epoch`, `rank`.

    Raises:
        CalibrationError: the loss is not a number.
    """
    seed = config.seed * 1013 + checkpoint
    rank = max(1, min(config.lens_rank, source.hidden_size // 2))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lens = Lens(source.hidden_size, rank)
    generator = torch.Generator().manual_seed(seed)
    raw, full = train.raw[checkpoint], train.raw[source.num_layers]
    # Fitted to states of unit size, as routers are; the bias is rescaled afterwards.
    size = float(raw[:8192].square().mean().sqrt().clamp_min(1e-12))
    rows = torch.randperm(validation.kept, generator=generator)[:VALIDATION_TOKENS]
    held_raw, held_full = validation.raw[checkpoint][rows], normalize(source, validation.raw[source.num_layers][rows])

    def exits(states: torch.Tensor) -> torch.Tensor:
        return source.normalize((lens(states / size) * size).to(source.device))

    def validation_loss() -> float:
        with torch.no_grad():
            return float(divergence(source, exits(held_raw).float().cpu(), held_full).mean())

    optimizer = torch.optim.Adam(lens.parameters(), lr=config.lens_learning_rate)
    batch = next(blocks(source, BATCH_TOKENS)).stop  # fewer where their logits would be too large
    steps = config.lens_epochs * -(-min(config.lens_tokens, train.kept) // batch)
    before = best_loss = validation_loss()
    best, best_epoch, step = copy.deepcopy(lens.state_dict()), 0, 0
    for epoch in range(1, config.lens_epochs + 1):
        for rows in torch.randperm(train.kept, generator=generator)[: config.lens_tokens].split(batch):
            for group in optimizer.param_groups:
                group["lr"] = config.lens_learning_rate * (1 - step / steps)
            with torch.no_grad():
                target = source.head(source.normalize(full[rows].to(source.device))[None])[0].float().log_softmax(-1)
            prediction = source.head(exits(raw[rows])[None])[0].float().log_softmax(-1)
            loss = (target.exp() * (target - prediction)).sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
        if (current := validation_loss()) < best_loss:
            best_loss, best, best_epoch = current, copy.deepcopy(lens.state_dict()), epoch
        elif current != current:
            raise CalibrationError(f"the lens at checkpoint {checkpoint} cannot be fitted: its loss is not a number")
    lens.load_state_dict(best)
    with torch.no_grad():
        lens.up.bias.mul_(size)
    lens.eval().requires_grad_(False)
    return lens, {"kl_before": before, "kl_after": best_loss, "best_epoch": best_epoch, "rank": rank}
