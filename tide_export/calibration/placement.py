"""Places checkpoints by measuring after which layers predictions are final: `--checkpoints auto`.

Runs the model over a few thousand tokens and applies the head to every layer's hidden state, which shows the possible
gain of early exit before any router is fitted.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tide_export.calibration.assessment import Convergence, Costs
from tide_export.calibration.collect import collect
from tide_export.calibration.config import TideConfig
from tide_export.calibration.evaluate import count_costs
from tide_export.calibration.labels import Target, blocks, normalize, predict
from tide_export.calibration.parallel import in_parallel
from tide_export.common.progress import stage
from tide_export.data.sequences import TokenSequence
from tide_export.errors import CalibrationError
from tide_export.model.source import SourceModel

logger = logging.getLogger("tide_export")

TOKENS = 4096  # for placing checkpoints
CURVE_TOKENS = 1024  # for the curve in the report
RECALL = 0.5  # of tokens that may exit, a router lets out this share at least: docs/measurements/modes-and-drafts.md
BRANCH_COST = 0.012  # of a branch for a token, as a share of all layers: docs/measurements/modes-and-drafts.md


@dataclass(frozen=True)
class LayerStatistics:
    """Measurements of n tokens after each of L layers.

    Attributes:
        unchanged: bool [n, L], whether the head's likeliest token for the hidden state after 1 .. L layers is full
            depth's.
        kl: float32 [n, L], KL(full || the head's distribution for that hidden state), nats.
        cosine: float32 [n, L], cosine similarity of the raw hidden state with the last layer's.
    """

    unchanged: np.ndarray
    kl: np.ndarray
    cosine: np.ndarray

    def convergence(self) -> Convergence:
        """Averages over the tokens."""

        def means(columns: np.ndarray) -> tuple[float, ...]:
            return tuple(float(value) for value in columns.mean(axis=0))

        layers = tuple(range(1, self.unchanged.shape[1] + 1))
        return Convergence(layers, means(~self.unchanged), means(self.kl), means(self.cosine), len(self.unchanged))


def place_checkpoints(source: SourceModel, sequences: Sequence[TokenSequence], config: TideConfig) -> tuple[int, ...]:
    """Returns the checkpoints of `config`; for "auto", chooses them by measurements on `sequences`.

    Raises:
        ConfigError: the checkpoints do not fit the model.
        CalibrationError: `collect` fails, or no checkpoint saves more than it costs.
    """
    if config.checkpoints != "auto":
        return config.resolve_checkpoints(source.num_layers)
    statistics = measure_layers(source, sequences, config, TOKENS)
    chosen = choose_checkpoints(statistics, count_costs(source, config), config.min_layers)
    logger.info("checkpoints auto: after %s of %d layers", ", ".join(map(str, chosen)), source.num_layers)
    return chosen


def measure_layers(
    source: SourceModel, sequences: Sequence[TokenSequence], config: TideConfig, tokens: int
) -> LayerStatistics:
    """Measures a sample of `tokens` tokens of `sequences` after every layer.

    Raises:
        CalibrationError: `collect` fails.
    """
    depth = source.num_layers
    drawn = _draw(sequences, 4 * tokens)  # more tokens than needed, because neighbouring ones resemble each other
    sample = collect(source, drawn, range(1, depth + 1), config, tokens, "looking at the model layer by layer")
    unchanged = np.empty((sample.kept, depth), bool)
    kl, cosine = np.empty(unchanged.shape, np.float32), np.empty(unchanged.shape, np.float32)

    def measure(rows: slice) -> None:
        with torch.no_grad():
            last = sample.raw[depth][rows]
            full = predict(source, normalize(source, last))
            target, tokens = Target(full), full.likeliest()
            for layers in range(1, depth + 1):
                raw = sample.raw[layers][rows]
                here = predict(source, normalize(source, raw)) if layers < depth else full
                unchanged[rows, layers - 1] = here.unchanged(tokens).numpy()
                kl[rows, layers - 1] = target.divergence(here).numpy()
                cosine[rows, layers - 1] = torch.cosine_similarity(raw, last, dim=-1).numpy()

    parts = list(blocks(source, sample.kept))
    with stage("comparing its layers", total=float(len(parts))) as advance:
        for _ in in_parallel(source, measure, parts):
            advance(1)
    return LayerStatistics(unchanged, kl, cosine)


def choose_checkpoints(statistics: LayerStatistics, costs: Costs, min_layers: int) -> tuple[int, ...]:
    """Adds checkpoints greedily, the best first, as long as one saves more than it costs.

    A token may exit at a layer if it is unchanged there (greedy) and after all deeper layers: a prediction that is lost
    again is chance, which no router can predict. Every router is assumed to find the same share `RECALL` of these
    tokens, because routers read similar hidden states. A checkpoint costs its router (and lens) for every token that
    reaches it, and a branch in the graph.

    Args:
        costs: costs of one layer and one router in a common unit.
        min_layers: the smallest checkpoint allowed.

    Raises:
        CalibrationError: no checkpoint saves more than it costs.
    """
    depth = statistics.unchanged.shape[1]
    settled = np.logical_and.accumulate(statistics.unchanged[:, ::-1], axis=1)[:, ::-1]
    router = (costs.router + costs.lens) / costs.layer

    def saved(chosen: Sequence[int]) -> float:
        gain, exited = 0.0, np.zeros(len(settled), bool)
        for layers in sorted(chosen):
            gain -= (1 - RECALL * float(exited.mean())) * router + BRANCH_COST * depth
            exits = settled[:, layers - 1] & ~exited
            gain += RECALL * float(exits.mean()) * (depth - layers)
            exited |= exits
        return gain

    chosen: list[int] = []
    while True:
        rest = [layers for layers in range(max(1, min_layers), depth) if layers not in chosen]
        best = max(rest, key=lambda layers: saved([*chosen, layers]), default=None)
        if best is None or saved([*chosen, best]) <= saved(chosen):
            break
        chosen.append(best)
    if not chosen:
        raise CalibrationError(
            f"checkpoints auto: no checkpoint from layer {max(1, min_layers)} on saves more than it costs on this "
            f"text: lower --min-layers, or this model gains nothing from early exit"
        )
    return tuple(sorted(chosen))


def _draw(sequences: Sequence[TokenSequence], tokens: int) -> list[TokenSequence]:
    """Draws sequences with at least `tokens` tokens in total, or all."""
    chosen: list[TokenSequence] = []
    drawn = 0
    for number in np.random.default_rng(0).permutation(len(sequences)).tolist():
        if drawn >= tokens:
            break
        chosen.append(sequences[number])
        drawn += len(sequences[number].ids)
    return chosen
