"""Computes TIDE's post-hoc rule in eager PyTorch, slow and plain: the reference of all engines.

"Run every layer for every token, then take the earliest checkpoint whose router says converged" (TIDE 0.2.1,
`runtime.py`, with its errors corrected: the final norm once, the model's own norm, thresholds per checkpoint). Every
engine must equal it token for token in `exit` mode, and Hugging Face (every checkpoint off) in `full` mode. Shares no
code with the runtimes but the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tide_export.model.source import SourceModel
from tide_export.routers.router_set import RouterSet


@dataclass(frozen=True)
class OracleOutput:
    """Result of the rule at each of S positions.

    Attributes:
        logits: [S, V] float32, of each position's exit.
        exit_layers: [S] int64, layers before the exit (the model's depth if no score was above its threshold).
        scores: [S, K-1] float32, every router's score, also after the exit.
        full_logits: [S, V], the model's logits in the same pass.
    """

    logits: torch.Tensor
    exit_layers: torch.Tensor
    scores: torch.Tensor
    full_logits: torch.Tensor


@torch.no_grad()
def oracle(
    source: SourceModel, routers: RouterSet, input_ids: Sequence[int], thresholds: Sequence[float]
) -> OracleOutput:
    """Applies the rule to one sequence of S token ids.

    Args:
        thresholds: one per checkpoint; 2.0: never exit.
    """
    depth, checkpoints = source.num_layers, routers.checkpoints
    ids = torch.as_tensor(list(input_ids), dtype=torch.long, device=source.device)[None]
    rule = _Rule(source, routers, thresholds, ids.shape[1])
    hidden = source.run(ids, [*checkpoints, depth])
    for layers in checkpoints:
        rule.decide(layers, hidden.raw[layers])
    chosen = torch.where(rule.exited[..., None], rule.chosen, source.normalize(hidden.raw[depth]))
    scores = torch.stack(rule.scores, dim=-1)[0] if checkpoints else torch.zeros(ids.shape[1], 0)
    return OracleOutput(source.head(chosen)[0], rule.exit_layers[0], scores, hidden.logits[0])


class _Rule:
    """Decides the exits of all positions, checkpoint by checkpoint."""

    def __init__(self, source: SourceModel, routers: RouterSet, thresholds: Sequence[float], length: int):
        self.source, self.routers = source, routers
        self.thresholds = dict(zip(routers.checkpoints, thresholds, strict=True))
        self.exited = torch.zeros(1, length, dtype=torch.bool, device=source.device)
        self.exit_layers = torch.full((1, length), source.num_layers, device=source.device)
        self.chosen = torch.zeros(1, length, source.normalized_size, device=source.device)
        self.scores: list[torch.Tensor] = []

    def decide(self, layers: int, raw: torch.Tensor) -> None:
        """Applies the router after `layers` layers to raw hidden states [1, S, D]."""
        normalized = self.routers.exit_state(self.source, layers, raw)
        score = self.routers.routers[layers].to(raw.device)(normalized)
        if self.routers.cumulative and self.scores:  # of an exit here or before
            score = self.scores[-1] + (1 - self.scores[-1]) * score
        exits_here = (score > self.thresholds[layers]) & ~self.exited
        self.chosen = torch.where(exits_here[..., None], normalized, self.chosen)
        self.exit_layers = torch.where(exits_here, layers, self.exit_layers)
        self.exited = self.exited | exits_here
        self.scores.append(score)
