"""Fits the lenses of all checkpoints on a stream of text.

A tuned lens (Belrose et al., https://arxiv.org/abs/2303.08112) of low rank brings the head's distribution for its
output near the full model's (`lens_loss`); everything else is frozen. For each batch of text the head runs once for all
checkpoints, and every lens is updated. The hidden states are those that `collect` kept, if it kept all; else the model
runs again and the hidden states are freed, so that memory does not grow with the text.

The lenses are measured on validation tokens while they are fitted, and the best weights of each are kept. A lens is
used if these are better than no lens, and with `exit_strategy = "auto"` only if it saves more than it costs.
"""

import copy
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tide_export.calibration.collect import CPU_TOKENS, Sample, check_ids
from tide_export.calibration.config import TideConfig
from tide_export.calibration.evaluate import count_costs, lens_rank
from tide_export.calibration.fast_attention import fast_attention
from tide_export.calibration.labels import Target, blocks, normalize, predict
from tide_export.calibration.lens_fit import LensFit
from tide_export.calibration.lens_loss import PartialHead
from tide_export.calibration.lens_snapshot import LensSnapshot
from tide_export.calibration.parallel import in_parallel
from tide_export.calibration.placement import RECALL
from tide_export.calibration.sampling_plan import Batch, Plan
from tide_export.common.progress import stage
from tide_export.data.sequences import TokenSequence
from tide_export.model.source import SourceModel
from tide_export.routers.router import Lens

logger = logging.getLogger("tide_export")

UPDATE_TOKENS = 64  # per update: with more, a lens needs more text
VALIDATION_TOKENS = 2048
MEASUREMENTS = 5  # on validation tokens, evenly over the tokens seen
TRIAL = 0.35  # share of the tokens after which a lens that saves too little is given up, with `exit_strategy = "auto"`
MAX_GRADIENT = 1.0  # norm


def fit_lenses(
    source: SourceModel,
    sequences: Sequence[TokenSequence],
    train: Sample,
    validation: Sample,
    config: TideConfig,
    checkpoints: Sequence[int],
    folder: Path | None = None,
) -> tuple[dict[int, Lens], dict[int, dict[str, Any]]]:
    """Fits the lenses of `checkpoints` to the training split; none with `exit_strategy = "identity"`.

    Args:
        sequences: the training split.
        train, validation: hidden states at the checkpoints and after the last layer. If `train` keeps every token of
            `sequences`, the model does not run again.
        folder: folder in which the lenses are saved while they are fitted, from which a killed run resumes.

    Returns:
        The lenses of the checkpoints that use one, and the report of each checkpoint: `used`, `reason` if it is not,
        `rank`, `tokens` seen; on validation tokens `kl_before`, `kl_after`, `may_exit_before`, `may_exit_after` and
        `curve`, a list for each field of `LensFit.curve`.

    Raises:
        CalibrationError: a token id is outside the vocabulary, or the folder cannot be used.
    """
    if config.exit_strategy == "identity":
        return {}, {}
    check_ids(source, sequences)
    text = _Stream.make(source, sequences, config)
    fits = {layers: start(source, validation.raw[layers], config, layers) for layers in checkpoints}
    saved = LensSnapshot(source, config, text.sha256, checkpoints, folder)
    held_out = _draw(validation, config.seed)
    with stage("fitting lenses", total=float(text.tokens)) as advance:
        first = saved.restore(fits)
        if not first:
            _measure(source, held_out, config, fits, 0)
        advance(float(text.ends[first - 1]) if first else 0.0)
        _train(source, text, train, held_out, config, fits, first, saved, advance)
    reports = {layers: _report(source, config, layers, fit) for layers, fit in fits.items()}
    logger.info("%s", _sentence(reports))
    return {layers: fits[layers].folded() for layers, report in reports.items() if report["used"]}, reports


def start(source: SourceModel, hidden: torch.Tensor, config: TideConfig, layers: int) -> LensFit:
    """Returns a lens that changes nothing, for raw hidden states like `hidden` [n, D]."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed * 1013 + layers)
        lens = Lens(source.hidden_size, lens_rank(source, config)).to(source.device)
    optimizer = torch.optim.Adam(lens.parameters(), lr=config.lens_learning_rate)
    size = float(hidden[:8192].square().mean().sqrt().clamp_min(1e-12))
    return LensFit(lens, optimizer, size, best=copy.deepcopy(lens.state_dict()))


def update(fit: LensFit, loss: torch.Tensor, rate: float) -> None:
    """Updates the lens by one step against the gradient of `loss`."""
    for group in fit.optimizer.param_groups:
        group["lr"] = rate
    fit.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(fit.lens.parameters(), MAX_GRADIENT)
    fit.optimizer.step()


@dataclass(frozen=True)
class _Stream:
    """The passes over the text: indices of batches of `plan`; `ends` has the tokens seen after each."""

    plan: Plan
    order: list[int]
    ends: np.ndarray

    @classmethod
    def make(cls, source: SourceModel, sequences: Sequence[TokenSequence], config: TideConfig) -> "_Stream":
        """Draws batches until they have `lens_tokens` tokens, for at most `lens_epochs` epochs."""
        per_pass = CPU_TOKENS if source.device.type == "cpu" else None
        every = sum(len(sequence.ids) for sequence in sequences)
        plan = Plan.make(sequences, every, config.seed, config.calibration_batch, per_pass)
        generator = np.random.default_rng(config.seed)
        epochs = min(config.lens_epochs, math.ceil(config.lens_tokens / plan.kept))
        order = [int(n) for _ in range(epochs) for n in generator.permutation(len(plan.batches))]
        ends = np.cumsum([len(plan.batch(number).slots) for number in order])
        stop = int(np.searchsorted(ends, config.lens_tokens)) + 1
        return cls(plan, order[:stop], ends[:stop])

    @property
    def tokens(self) -> int:
        return int(self.ends[-1])

    @property
    def sha256(self) -> str:
        return self.plan.sha256


def _train(
    source: SourceModel,
    text: _Stream,
    train: Sample,
    held_out: Sample,
    config: TideConfig,
    fits: dict[int, LensFit],
    first: int,
    saved: "LensSnapshot",
    advance: Any,
) -> None:
    head = PartialHead(source)
    depth, seen = source.num_layers, int(text.ends[first - 1]) if first else 0
    rows = next(blocks(source, UPDATE_TOKENS)).stop  # fewer if their logits would be too large
    some = text.plan.sequences[int(text.plan.locations[0, 0])].ids.tolist()
    with fast_attention(source, some, [*fits, depth]):
        for number in range(first, len(text.order)):
            fitted = {layers: fit for layers, fit in fits.items() if not fit.given_up}
            if not fitted:
                break
            generator = torch.Generator().manual_seed(config.seed * 1_000_003 + number)
            batch = text.plan.batch(text.order[number])
            if train.kept == text.plan.kept:
                rows_kept = torch.from_numpy(batch.slots)
                hidden = {n: train.raw[n].index_select(0, rows_kept).to(source.device) for n in (*fitted, depth)}
            else:
                hidden = _run(source, head, batch, [*fitted, depth])
            rate = config.lens_learning_rate * (1 - seen / text.tokens)
            for part in torch.randperm(len(batch.slots), generator=generator).split(rows):
                part = part.to(source.device)
                with torch.no_grad():
                    full = source.normalize(hidden[depth][part].float())
                target = head.target(full, generator)
                for layers, fit in fitted.items():
                    exits = source.normalize(fit.translate(hidden[layers][part].float()))
                    update(fit, target.loss(exits), rate)
            before, seen = seen, int(text.ends[number])
            if seen * MEASUREMENTS // text.tokens > before * MEASUREMENTS // text.tokens:
                _measure(source, held_out, config, fitted, seen)
                if config.exit_strategy == "auto" and seen >= TRIAL * text.tokens:
                    _give_up(source, config, fitted)
            advance(float(seen - before))
            saved.save(fits, number + 1, last=number + 1 == len(text.order))


@torch.no_grad()
def _run(source: SourceModel, head: PartialHead, batch: Batch, layers: Sequence[int]) -> dict[int, torch.Tensor]:
    """Computes the hidden states [k, D] of the batch's k tokens, on the model's device."""

    def keep(hidden: torch.Tensor) -> torch.Tensor:
        return hidden[batch.rows.to(hidden.device), batch.positions.to(hidden.device)].to(source.device)

    with head.autocast():
        return source.raw_hidden(batch.ids.to(source.device), layers, batch.mask.to(source.device), keep)


def _draw(validation: Sample, seed: int) -> Sample:
    """Draws `VALIDATION_TOKENS` of the validation tokens."""
    rows = torch.randperm(validation.kept, generator=torch.Generator().manual_seed(seed))[:VALIDATION_TOKENS]
    return replace(
        validation,
        raw={layers: hidden[rows] for layers, hidden in validation.raw.items()},
        next_ids=validation.next_ids[rows],
        documents=validation.documents[rows],
        locations=validation.locations[rows],
    )


@torch.no_grad()
def _measure(source: SourceModel, held_out: Sample, config: TideConfig, fits: dict[int, LensFit], seen: int) -> None:
    """Adds a point to the curve of each lens, keeps its best weights, and gives up diverged lenses."""

    def translated(layers: int, fit: LensFit, rows: slice) -> torch.Tensor:
        return source.normalize(fit.translate(held_out.raw[layers][rows].to(source.device)).float())

    def measure(rows: slice) -> dict[int, torch.Tensor]:
        """Computes KL and label of each token of a block, [2, n]."""
        with torch.no_grad():
            last = held_out.raw[source.num_layers][rows]
            full = predict(source, normalize(source, last))
            target, tokens = Target(full), full.likeliest()
            found = {}
            for layers, fit in fits.items():
                here = predict(source, translated(layers, fit, rows))
                kl = target.divergence(here)
                if config.label == "unchanged":
                    label = here.unchanged(tokens)
                elif config.label == "kl":
                    label = kl < config.kl_bound
                else:  # a new lens changes nothing
                    cosine = torch.cosine_similarity(held_out.raw[layers][rows], last, dim=-1)
                    label = cosine > config.convergence_threshold
                found[layers] = torch.stack([kl, label.float()])
            return found

    parts = list(in_parallel(source, measure, blocks(source, held_out.kept)))
    for layers, fit in fits.items():
        kl, share = torch.cat([part[layers] for part in parts], dim=1).mean(1).tolist()
        if kl != kl:
            fit.given_up = "diverges"
            logger.warning(
                "the lens at checkpoint %d diverges (its loss is not a number): hidden states exit unchanged there; "
                "a lower --lens-learning-rate may help",
                layers,
            )
            continue
        fit.curve.append({"tokens": seen, "kl": kl, "may_exit": share})
        if fit.best_measurement() is fit.curve[-1]:
            fit.best = copy.deepcopy(fit.lens.state_dict())


def _give_up(source: SourceModel, config: TideConfig, fits: dict[int, LensFit]) -> None:
    for layers, fit in fits.items():
        if not fit.given_up and _net_gain(source, config, layers, fit) <= 0:
            fit.given_up = COSTS_MORE


COSTS_MORE = "costs more than it saves"


def _net_gain(source: SourceModel, config: TideConfig, layers: int, fit: LensFit) -> float:
    """Estimates the layers that the lens saves per token at the checkpoint, minus its cost.

    A router is assumed to find the share `RECALL` of the tokens that may exit, as in `placement`.
    """
    costs = count_costs(source, config)
    more = fit.best_measurement()["may_exit"] - fit.curve[0]["may_exit"]
    return more * RECALL * (source.num_layers - layers) - costs.lens / costs.layer


def _report(source: SourceModel, config: TideConfig, layers: int, fit: LensFit) -> dict[str, Any]:
    before, best = fit.curve[0], fit.best_measurement()
    reason = fit.given_up
    if not reason and best is before:
        reason = "is worse than none"
        logger.warning(
            "the lens at checkpoint %d is worse than none on held-out text: hidden states exit unchanged there", layers
        )
    if not reason and config.exit_strategy == "auto" and _net_gain(source, config, layers, fit) <= 0:
        reason = COSTS_MORE
    return {
        "used": not reason,
        **({"reason": reason} if reason else {}),
        "rank": fit.lens.down.out_features,
        "tokens": int(fit.curve[-1]["tokens"]),
        "kl_before": before["kl"],
        "kl_after": best["kl"],
        "may_exit_before": before["may_exit"],
        "may_exit_after": best["may_exit"],
        "curve": {name: [point[name] for point in fit.curve] for name in fit.curve[0]},
    }


def _sentence(reports: dict[int, dict[str, Any]]) -> str:
    """Returns a sentence on the checkpoints that use lenses, and their effect on held-out tokens."""
    used = [layers for layers, report in reports.items() if report["used"]]
    others = [layers for layers in reports if layers not in used]
    if not used:
        return "exits use the model's own hidden states: on held-out text a lens gains too little at every checkpoint"
    shares = ", ".join(
        f"{100 * reports[n]['may_exit_before']:.0f} -> {100 * reports[n]['may_exit_after']:.0f} %" for n in used
    )
    unchanged = (
        f"; hidden states exit unchanged at {', '.join(map(str, others))}, where one gains too little" if others else ""
    )
    return f"lenses are used at {', '.join(map(str, used))}: held-out tokens that may exit there {shares}{unchanged}"
