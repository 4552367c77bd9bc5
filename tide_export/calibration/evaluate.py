"""Measures fitted routers and lenses on the test split, to which nothing was fitted.

Fills the records of `assessment`, which the report and the tables show.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from tide_export.calibration.assessment import Costs, Evaluation, Example
from tide_export.calibration.collect import Sample
from tide_export.calibration.config import TideConfig
from tide_export.calibration.fit_router import LabelledHidden, assess
from tide_export.calibration.labels import Target, blocks, likeliest, normalize, predict
from tide_export.calibration.parallel import in_parallel
from tide_export.common.changed_tokens import added_loss, changed_tokens
from tide_export.data.sequences import TokenSequence
from tide_export.model.source import SourceModel
from tide_export.routers.router_set import RouterSet
from tide_export.thresholds.pareto import exits

logger = logging.getLogger("tide_export")

EXAMPLES = 2
EXAMPLE_TOKENS = 240


def evaluate(
    source: SourceModel,
    routers: RouterSet,
    sample: Sample,
    config: TideConfig,
    advance: Callable[[float], object] = lambda amount: None,
) -> Evaluation:
    """Measures every exit of `routers` on the tokens of `sample`.

    Args:
        advance: called with the share of the work done since its last call.
    """
    depth, checkpoints = source.num_layers, routers.checkpoints
    shape = sample.kept, len(checkpoints)
    scores, kl = np.empty(shape, np.float32), np.empty(shape, np.float32)
    labels, unchanged = np.empty(shape, bool), np.empty(shape, bool)
    changed, added = np.empty(shape, np.float32), np.empty(shape, np.float32)

    def measure(rows: slice) -> slice:
        """Measures all exits of a block of tokens, computing the full model's predictions once."""
        with torch.no_grad():
            raw = {layers: sample.raw[layers][rows] for layers in (*checkpoints, depth)}
            full = predict(source, normalize(source, raw[depth]))
            target, tokens, full_logits = Target(full), full.likeliest(), full.logits.cpu().numpy()
            for k, layers in enumerate(checkpoints):
                hidden = normalize(source, raw[layers], routers.lenses.get(layers))
                here = predict(source, hidden)
                scores[rows, k] = routers.routers[layers](hidden).numpy()
                unchanged[rows, k] = here.unchanged(tokens).numpy()
                kl[rows, k] = target.divergence(here).numpy()
                logits = here.logits.cpu().numpy()
                changed[rows, k] = changed_tokens(full_logits, logits, config.temperature)
                added[rows, k] = added_loss(full_logits, logits, config.temperature)
                if config.label == "cosine":
                    cosine = torch.cosine_similarity(raw[layers], raw[depth], dim=-1)
                    labels[rows, k] = (cosine > config.convergence_threshold).numpy()
        return rows

    for done in in_parallel(source, measure, blocks(source, sample.kept)):
        advance((done.stop - done.start) / sample.kept)
    if config.label != "cosine":
        labels = unchanged.copy() if config.label == "unchanged" else kl < config.kl_bound
    documents = sample.documents.numpy()
    measured = scores, labels, unchanged, kl, changed, added, documents
    return Evaluation(depth, checkpoints, *measured, config.temperature, source.loops)


def report_checkpoints(
    source: SourceModel,
    routers: RouterSet,
    test: Sample,
    evaluation: Evaluation,
    config: TideConfig,
    reports: dict[int, dict[str, Any]],
) -> dict[str, dict[str, Any]]:
    """Adds the measurements on the test split to the reports of the fit and logs them.

    Returns:
        Checkpoint (a string) -> its report.
    """
    extended: dict[str, dict[str, Any]] = {}
    for k, layers in enumerate(routers.checkpoints):
        hidden = normalize(source, test.raw[layers], routers.lenses.get(layers))
        held_out = LabelledHidden(hidden, torch.from_numpy(evaluation.labels[:, k].copy()))
        extended[str(layers)] = reports[layers] | assess(routers.routers[layers], held_out, config.exit_threshold)
        _log(layers, extended[str(layers)])
    return extended


@torch.no_grad()
def read_examples(
    source: SourceModel,
    tokenizer: PreTrainedTokenizerBase,
    routers: RouterSet,
    sequences: Sequence[TokenSequence],
    thresholds: Sequence[float],
) -> tuple[Example, ...]:
    """Predicts the first passages of `sequences`, each from another document, with exits at `thresholds`."""
    chosen: dict[int, TokenSequence] = {}
    for sequence in sequences:
        chosen.setdefault(sequence.document, sequence)
    examples = []
    for sequence in list(chosen.values())[:EXAMPLES]:
        ids = torch.tensor(sequence.ids[:EXAMPLE_TOKENS].tolist(), device=source.device)
        depth, checkpoints = source.num_layers, routers.checkpoints
        raw = {
            layers: one[0].float().cpu() for layers, one in source.raw_hidden(ids[None], [*checkpoints, depth]).items()
        }
        hidden = [normalize(source, raw[layers], routers.lenses.get(layers)) for layers in checkpoints]
        scores = torch.stack([routers.routers[c](s) for c, s in zip(checkpoints, hidden, strict=True)], dim=-1)
        taken = exits(scores.numpy(), thresholds)
        hidden.append(normalize(source, raw[depth]))
        choices = torch.stack([likeliest(source, one) for one in hidden], dim=-1).numpy()
        predicted = choices[np.arange(len(taken)), taken]
        examples.append(
            Example(
                pieces=tuple(str(tokenizer.decode([token])) for token in ids.tolist()),
                predicted=tuple(str(tokenizer.decode([int(token)])) for token in predicted),
                exit_layers=tuple(int(layers) for layers in np.array([*checkpoints, depth])[taken]),
                unchanged=tuple(bool(same) for same in predicted == choices[:, -1]),
            )
        )
    return tuple(examples)


def count_costs(source: SourceModel, config: TideConfig, lenses: float = 1.0) -> Costs:
    """Counts the operations per token of the model's parts, two per weight that a token multiplies.

    Args:
        lenses: share of the checkpoints that have a lens, if `config` allows lenses.
    """
    layer = sum(p.numel() for one in source.structure.layers for p in one.parameters()) / source.num_layers
    width = source.normalized_size
    shortlist = min(config.router_shortlist, source.vocab_size)
    rank = 0 if config.exit_strategy == "identity" else lens_rank(source, config)
    return Costs(
        layer=2.0 * layer,
        head=2.0 * width * source.vocab_size,
        router=2.0 * (width * (config.router_bottleneck_dim + shortlist) + config.router_bottleneck_dim),
        lens=2.0 * 2 * source.hidden_size * rank * lenses,
    )


def lens_rank(source: SourceModel, config: TideConfig) -> int:
    """Returns the rank of a lens: `config.lens_rank`, at most half the hidden size."""
    return max(1, min(config.lens_rank, source.hidden_size // 2))


def _log(layers: int, report: dict[str, Any]) -> None:
    precision, recall = (
        f"{100 * value:.1f} %" if value is not None else "n/a" for value in (report["precision"], report["recall"])
    )
    logger.info(
        "checkpoint %d: %.1f %% of %d held-out tokens may exit; with score > %.2f %.1f %% do, precision %s, "
        "recall %s (accuracy at 0.5: %.1f %%; loss %.3f, without a router %.3f; calibration error %.3f)",
        layers,
        100 * report["positive_rate"],
        report["tokens"],
        report["threshold"],
        100 * report["exit_rate"],
        precision,
        recall,
        100 * report["accuracy"],
        report["loss"],
        report["base_loss"],
        report["ece"],
    )
