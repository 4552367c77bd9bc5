"""Measures fitted routers and lenses on the test split, which nothing was fitted to: last step of `calibrate`.

Fills the records of `evaluation.py`, from which the report and the tables are made.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from tide_export.calibration.assessment import Costs, Evaluation, Example
from tide_export.calibration.collect import Sample
from tide_export.calibration.labels import Target, answers, blocks, normalize, top1
from tide_export.calibration.parallel import in_parallel
from tide_export.config import TideConfig
from tide_export.data.sequences import TokenSequence
from tide_export.model.source import SourceModel
from tide_export.routers.router_set import RouterSet
from tide_export.thresholds.pareto import exits

EXAMPLES = 2
EXAMPLE_TOKENS = 240


def evaluate(
    source: SourceModel,
    routers: RouterSet,
    sample: Sample,
    config: TideConfig,
    advance: Callable[[float], object] = lambda amount: None,
) -> Evaluation:
    """What every exit of `routers` gives for the tokens of `sample`; `advance` is told the share done since."""
    depth, checkpoints = source.num_layers, routers.checkpoints
    shape = sample.kept, len(checkpoints)
    scores, kl = np.empty(shape, np.float32), np.empty(shape, np.float32)
    labels, agrees = np.empty(shape, bool), np.empty(shape, bool)
    nll = np.full((sample.kept, len(checkpoints) + 1), np.nan, np.float32)

    def measure(rows: slice) -> slice:
        """All exits of a block of tokens: the full model's answer is made once for them."""
        with torch.no_grad():
            following, known = sample.next_ids[rows].clamp_min(0), sample.next_ids[rows] >= 0
            raw = {layers: sample.raw[layers][rows] for layers in (*checkpoints, depth)}
            full = answers(source, normalize(source, raw[depth]))
            target, said = Target(full), full.first()
            nll[rows, -1] = torch.where(known, full.nll(following), torch.nan).numpy()
            for k, layers in enumerate(checkpoints):
                states = exit_states(source, routers, layers, raw[layers])
                here = answers(source, states)
                scores[rows, k] = routers.routers[layers](states).numpy()
                agrees[rows, k] = here.agree(said).numpy()
                kl[rows, k] = target.divergence(here).numpy()
                nll[rows, k] = torch.where(known, here.nll(following), torch.nan).numpy()
                if config.label == "cosine":
                    turned = torch.cosine_similarity(raw[layers], raw[depth], dim=-1)
                    labels[rows, k] = (turned > config.convergence_threshold).numpy()
        return rows

    for done in in_parallel(source, measure, blocks(source, sample.kept)):
        advance((done.stop - done.start) / sample.kept)
    if config.label != "cosine":
        labels = agrees.copy() if config.label == "agreement" else kl < config.kl_bound
    return Evaluation(depth, checkpoints, scores, labels, agrees, kl, nll, sample.documents.numpy())


@torch.no_grad()
def exit_states(source: SourceModel, routers: RouterSet, layers: int, raw: torch.Tensor) -> torch.Tensor:
    """Normalized states [n, D'] of exits after `layers` layers, float32 on the CPU."""
    parts = [routers.exit_state(source, layers, part.to(source.device)) for part in raw.split(8192)]
    return torch.cat([part.float().cpu() for part in parts])


@torch.no_grad()
def read_examples(
    source: SourceModel,
    tokenizer: PreTrainedTokenizerBase,
    routers: RouterSet,
    sequences: Sequence[TokenSequence],
    thresholds: Sequence[float],
) -> tuple[Example, ...]:
    """The first passages of `sequences`, each from another document, as they are read under `thresholds`."""
    chosen: dict[int, TokenSequence] = {}
    for sequence in sequences:
        chosen.setdefault(sequence.document, sequence)
    found = []
    for sequence in list(chosen.values())[:EXAMPLES]:
        ids = torch.tensor(sequence.ids[:EXAMPLE_TOKENS].tolist(), device=source.device)
        depth, checkpoints = source.num_layers, routers.checkpoints
        raw = {
            layers: state[0].float().cpu()
            for layers, state in source.raw_states(ids[None], [*checkpoints, depth]).items()
        }
        states = [exit_states(source, routers, layers, raw[layers]) for layers in checkpoints]
        scores = torch.stack([routers.routers[c](s) for c, s in zip(checkpoints, states, strict=True)], dim=-1)
        left = exits(scores.numpy(), thresholds)
        states.append(normalize(source, raw[depth]))
        choices = torch.stack([top1(source, state) for state in states], dim=-1).numpy()
        said = choices[np.arange(len(left)), left]
        found.append(
            Example(
                pieces=tuple(str(tokenizer.decode([token])) for token in ids.tolist()),
                predicted=tuple(str(tokenizer.decode([int(token)])) for token in said),
                exit_layers=tuple(int(layers) for layers in np.array([*checkpoints, depth])[left]),
                agrees=tuple(bool(same) for same in said == choices[:, -1]),
            )
        )
    return tuple(found)


def count_costs(source: SourceModel, config: TideConfig) -> Costs:
    """Operations per token of the model's parts: two for each weight that a token is multiplied with."""
    layer = sum(p.numel() for p in source.structure.layers.parameters()) / source.num_layers
    width = source.normalized_size
    shortlist = min(config.router_shortlist, source.vocab_size)
    rank = max(1, min(config.lens_rank, source.hidden_size // 2)) if config.exit_strategy == "lens" else 0
    return Costs(
        layer=2.0 * layer,
        head=2.0 * width * source.vocab_size,
        router=2.0 * (width * (config.router_bottleneck_dim + shortlist) + config.router_bottleneck_dim),
        lens=2.0 * 2 * source.hidden_size * rank,
    )
