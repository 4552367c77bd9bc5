"""Measures fitted routers and lenses on the test split, which nothing was fitted to: last step of `calibrate`.

Fills the records of `evaluation.py`, from which the report and the tables are made.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from tide_export.calibrate.collect import Sample
from tide_export.calibrate.evaluation import Costs, Evaluation, Example
from tide_export.calibrate.labels import blocks, may_leave, normed, top1
from tide_export.calibrate.sequences import TokenSequence
from tide_export.config import TideConfig
from tide_export.frontier import exits
from tide_export.model import SourceModel
from tide_export.routers import RouterSet

EXAMPLES = 2
EXAMPLE_TOKENS = 240


@torch.no_grad()
def evaluate(
    source: SourceModel,
    routers: RouterSet,
    sample: Sample,
    config: TideConfig,
    advance: Callable[[float], object] = lambda amount: None,
) -> Evaluation:
    """What every exit of `routers` gives for the tokens of `sample`; `advance` is called with 1 after each exit."""
    depth, checkpoints = source.num_layers, routers.checkpoints
    full = normed(source, sample.raw[depth])
    full_top1 = top1(source, full)
    count = sample.kept
    scores = np.empty((count, len(checkpoints)), np.float32)
    labels, agrees = np.empty(scores.shape, bool), np.empty(scores.shape, bool)
    kl, nll = np.empty(scores.shape, np.float32), np.full((count, len(checkpoints) + 1), np.nan, np.float32)
    following = sample.next_ids.clamp_min(0)
    known = sample.next_ids >= 0
    for k, layers in enumerate([*checkpoints, depth]):
        if layers == depth:
            states = full
        else:
            states = exit_states(source, routers, layers, sample.raw[layers])
            scores[:, k] = torch.cat([routers.routers[layers](part) for part in states.split(8192)]).numpy()
            labels[:, k] = may_leave(source, sample, config, layers, states, full_top1).numpy()
        for rows in blocks(source, count):
            answer = source.head(states[rows][None].to(source.device))[0].float().log_softmax(-1).cpu()
            loss = -answer.gather(-1, following[rows, None])[:, 0]
            nll[rows, k] = torch.where(known[rows], loss, torch.nan).numpy()
            if layers != depth:
                target = source.head(full[rows][None].to(source.device))[0].float().log_softmax(-1).cpu()
                kl[rows, k] = (target.exp() * (target - answer)).sum(-1).clamp_min(0).numpy()
                agrees[rows, k] = (answer.argmax(-1) == full_top1[rows]).numpy()
        advance(1)
    return Evaluation(depth, checkpoints, scores, labels, agrees, kl, nll, sample.documents.numpy())


@torch.no_grad()
def exit_states(source: SourceModel, routers: RouterSet, layers: int, raw: torch.Tensor) -> torch.Tensor:
    """Normed states [n, D'] of exits after `layers` layers, float32 on the CPU."""
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
        choices = torch.stack([top1(source, state) for state in [*states, normed(source, raw[depth])]], dim=-1).numpy()
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
    layer = sum(p.numel() for p in source.anatomy.layers.parameters()) / source.num_layers
    width = source.normed_size
    shortlist = min(config.router_shortlist, source.vocab_size)
    rank = max(1, min(config.lens_rank, source.hidden_size // 2)) if config.exit_strategy == "lens" else 0
    return Costs(
        layer=2.0 * layer,
        head=2.0 * width * source.vocab_size,
        router=2.0 * (width * (config.router_bottleneck_dim + shortlist) + config.router_bottleneck_dim),
        lens=2.0 * 2 * source.hidden_size * rank,
    )
