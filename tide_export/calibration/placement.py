"""Where the model has made up its mind, layer by layer, and where checkpoints pay: `--checkpoints auto`.

Runs the model over a few thousand tokens with every layer's state kept and asks the head after each. Before any router
is fitted this says what can be gained at all, so `calibrate` chooses checkpoints by it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tide_export.calibration.assessment import Convergence, Costs
from tide_export.calibration.collect import collect
from tide_export.calibration.labels import Target, answers, blocks, normalize
from tide_export.calibration.parallel import in_parallel
from tide_export.config import TideConfig
from tide_export.data.sequences import TokenSequence
from tide_export.errors import CalibrationError
from tide_export.model.source import SourceModel

TOKENS = 4096
FOUND = 0.5  # cautious share of the tokens that could leave that a fitted router exits; docs/measurements/routers.md
BRANCH = 0.012  # what a branch in the graph costs each token, as a share of all layers; docs/measurements/branches.md


@dataclass(frozen=True)
class Layerwise:
    """n tokens after every layer.

    Attributes:
        agrees: bool [n, L], the head on the state after 1 .. L layers gives the full model's top-1.
        kl: float32 [n, L], KL(full || that head's distribution), nats.
        cosine: float32 [n, L], of the raw state with the last layer's.
    """

    agrees: np.ndarray
    kl: np.ndarray
    cosine: np.ndarray

    def convergence(self) -> Convergence:
        def means(columns: np.ndarray) -> tuple[float, ...]:
            return tuple(float(value) for value in columns.mean(axis=0))

        layers = tuple(range(1, self.agrees.shape[1] + 1))
        return Convergence(layers, means(self.agrees), means(self.kl), means(self.cosine), len(self.agrees))


def look_layer_by_layer(source: SourceModel, sequences: Sequence[TokenSequence], config: TideConfig) -> Layerwise:
    """A sample of `TOKENS` tokens of `sequences` after every layer.

    Raises:
        CalibrationError: as `collect`.
    """
    depth = source.num_layers
    sample = collect(
        source, _beginning(sequences), range(1, depth + 1), config, TOKENS, "looking at the model layer by layer"
    )
    agrees = np.empty((sample.kept, depth), bool)
    kl, cosine = np.empty(agrees.shape, np.float32), np.empty(agrees.shape, np.float32)

    def look(rows: slice) -> None:
        with torch.no_grad():
            last = sample.raw[depth][rows]
            full = answers(source, normalize(source, last))
            target, choice = Target(full), full.first()
            for layers in range(1, depth + 1):
                raw = sample.raw[layers][rows]
                here = answers(source, normalize(source, raw)) if layers < depth else full
                agrees[rows, layers - 1] = here.agree(choice).numpy()
                kl[rows, layers - 1] = target.divergence(here).numpy()
                cosine[rows, layers - 1] = torch.cosine_similarity(raw, last, dim=-1).numpy()

    for _ in in_parallel(source, look, blocks(source, sample.kept)):
        pass
    return Layerwise(agrees, kl, cosine)


def choose_checkpoints(looked: Layerwise, costs: Costs, min_layers: int) -> tuple[int, ...]:
    """Few checkpoints: one is added as long as what it saves is more than what it costs, the best first.

    A token counts as able to leave where it agrees and does so after all deeper layers too: agreement that is lost
    again is luck, which no router can tell. A share `FOUND` of them is thought to be told by any router, the rest by
    none: routers read much the same thing. A checkpoint costs its router (and lens) for every token that reaches it,
    and a branch in the graph.

    Args:
        costs: of one layer and one router, in any common unit.
        min_layers: no checkpoint before it.

    Raises:
        CalibrationError: no checkpoint pays.
    """
    depth = looked.agrees.shape[1]
    settled = np.logical_and.accumulate(looked.agrees[:, ::-1], axis=1)[:, ::-1]
    router = (costs.router + costs.lens) / costs.layer

    def saved(chosen: Sequence[int]) -> float:
        gain, left = 0.0, np.zeros(len(settled), bool)
        for layers in sorted(chosen):
            gain -= (1 - FOUND * float(left.mean())) * router + BRANCH * depth
            leaves = settled[:, layers - 1] & ~left
            gain += FOUND * float(leaves.mean()) * (depth - layers)
            left |= leaves
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


def _beginning(sequences: Sequence[TokenSequence]) -> list[TokenSequence]:
    """Sequences spread over all, with four times the tokens the sample needs: neighbours resemble each other."""
    chosen: list[TokenSequence] = []
    tokens = 0
    spread = np.random.default_rng(0).permutation(len(sequences))
    for number in spread.tolist():
        if tokens >= 4 * TOKENS:
            break
        chosen.append(sequences[number])
        tokens += len(sequences[number].ids)
    return chosen
